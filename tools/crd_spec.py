"""The schema of a KVCachePool's spec and status.

Invariant: only fields that the operator acts on; every default is stated here.
"""

from __future__ import annotations

from tools.crd_types import (
    DNS_NAME,
    NAME_MAX,
    RULES,
    Schema,
    affinity,
    choice,
    count,
    cpu,
    endpoint,
    integer,
    items,
    label_selector,
    labels,
    mapping,
    quantity,
    rule,
    struct,
    text,
    toleration,
)

LIST_TYPE = "x-kubernetes-list-type"


def spec() -> Schema:
    """spec."""
    return struct(
        "What is wanted.",
        {
            "allowedNamespaces": _allowed_namespaces(),
            "agent": _agent(),
            "ram": struct(
                "The tier in the nodes' memory.",
                {
                    "capacityPerNode": quantity(
                        "Memory that each agent takes from its node for the arena.",
                        low="64Mi",
                        high="16Ti",
                        example="64Gi",
                    )
                },
                required=["capacityPerNode"],
            ),
            "valkey": _valkey(),
            "routing": _routing(),
        },
        required=["agent", "ram"],
    )


def _allowed_namespaces() -> Schema:
    return struct(
        "The namespaces whose engines may use the pool.",
        {
            "from": choice(
                "Same: the pool's own. Selector: those that `selector` matches. All: every one.",
                "Same",
                "Selector",
                "All",
                default="Same",
            ),
            "selector": label_selector("Labels of the namespaces; with `from: Selector` only.", is_checked=True),
        },
        extra={
            "default": {"from": "Same"},
            RULES: [
                rule(
                    "has(self.selector) == (self.from == 'Selector')",
                    "selector goes with from: Selector and with nothing else: set from to Selector, or remove selector",
                    field=".selector",
                )
            ],
        },
    )


def _agent() -> Schema:
    return struct(
        "The agents: one on each node that nodeSelector matches.",
        {
            "nodeSelector": labels(
                "Labels of the nodes. Agents reserve memory, so there is no `everywhere` by accident.", minProperties=1
            ),
            "tolerations": items(
                "Further taints that agents bear; those of GPU nodes are tolerated anyway.", toleration(), max_items=32
            ),
            "affinity": affinity(),
            "priorityClassName": text("PriorityClass of the agents.", max_length=NAME_MAX, default=""),
            "image": text("Image of the agents; empty: that of the operator's release.", max_length=1024, default=""),
            "imagePullPolicy": choice(
                "When the kubelet pulls the agents' image.", "Always", "IfNotPresent", "Never", default="IfNotPresent"
            ),
            "imagePullSecrets": items(
                "Secrets of the pool's namespace with which all its images are pulled.",
                _reference("Secret"),
                max_items=16,
            ),
            "resources": struct(
                "CPU of the agent container. Memory is derived from the capacity.",
                {
                    "requests": struct(
                        "Reserved.",
                        {
                            "cpu": cpu(
                                "CPUs; 100m if neither this nor a limit is given. "
                                "Blocks on their way to and from Valkey take up to one."
                            )
                        },
                    ),
                    "limits": struct("At most.", {"cpu": cpu("CPUs.")}),
                },
            ),
        },
        required=["nodeSelector"],
    )


def _reference(kind: str) -> Schema:
    return struct(
        f"A {kind} of the pool's namespace.",
        {"name": text("Its name.", max_length=NAME_MAX, minLength=1, pattern=DNS_NAME)},
        required=["name"],
    )


def _valkey() -> Schema:
    kept = "valkey cannot change between managed and external: create a new pool, or remove spec.valkey first"
    return struct(
        "The tier that all nodes share; absent: none.",
        {"managed": _managed(), "external": _external()},
        extra={
            RULES: [
                rule(
                    "has(self.managed) != has(self.external)",
                    "exactly one of managed and external is needed: set one, remove the other",
                ),
                rule("has(self.managed) == has(oldSelf.managed)", kept),
            ]
        },
    )


def _managed() -> Schema:
    return struct(
        "A Valkey cluster that the operator runs.",
        {
            "shards": integer("Number of primaries.", low=1, high=64, default=3),
            "memoryPerShard": quantity(
                "Memory limit of each; what it stores is a little less.", low="64Mi", high="1Ti", example="16Gi"
            ),
        },
        required=["memoryPerShard"],
    )


def _external() -> Schema:
    return struct(
        "A Valkey that somebody else runs.",
        {
            "endpoints": items(
                "host:port of any of its nodes; the others of a cluster are found.",
                endpoint("host:port, an IPv6 address in brackets."),
                max_items=32,
                minItems=1,
                **{LIST_TYPE: "set"},
            ),
            "keyPrefix": text(
                "Start of every key; empty: kvpool:<namespace>/<name>:. Cannot be changed.",
                max_length=64,
                pattern=r"^[!-z|~]*$",
                default="",
                **{
                    RULES: [
                        rule("self == oldSelf", "keyPrefix cannot be changed: create a new pool with the other prefix")
                    ]
                },
            ),
            "authSecretRef": _reference("Secret of type kubernetes.io/basic-auth"),
            "deletionPolicy": choice(
                "What happens to the pool's keys when it is deleted.", "Purge", "Retain", default="Purge"
            ),
        },
        required=["endpoints"],
    )


def _routing() -> Schema:
    return struct(
        "The router in front of the engines.",
        {
            "mode": choice("Proxy: an OpenAI-compatible proxy. Disabled: none.", "Proxy", "Disabled", default="Proxy"),
            "replicas": integer("Number of routers.", low=1, high=32, default=2),
            "service": struct(
                "The Service of the routers.",
                {
                    "type": choice("Its type.", "ClusterIP", "NodePort", "LoadBalancer", default="ClusterIP"),
                    "port": integer("Its port.", low=1, high=65535, default=80),
                    "annotations": mapping(
                        "Its annotations.", text("The annotation's value.", max_length=4096), max_properties=32
                    ),
                },
                extra={"default": {}},
            ),
        },
        extra={"default": {}},
    )


def status() -> Schema:
    """status."""
    return struct(
        "What is there.",
        {
            "observedGeneration": {
                "type": "integer",
                "format": "int64",
                "description": "The generation of the spec that this status is about.",
            },
            "conditions": items(
                "Ready, SpecAccepted, AgentsAvailable, ValkeyAvailable, RolloutComplete. Reasons: docs/troubleshooting.md.",
                _condition(),
                max_items=16,
                **{LIST_TYPE: "map", "x-kubernetes-list-map-keys": ["type"]},
            ),
            "summary": struct(
                "What `kubectl get` shows.",
                {
                    "message": text("Beginning of the message of condition Ready.", max_length=128),
                    "agents": text("Ready agents of those wanted.", max_length=32),
                    "valkey": text("Ready shards of those wanted, External or None.", max_length=32),
                },
            ),
            "agents": struct(
                "The agents.",
                {
                    "desired": count("Nodes that shall have one."),
                    "ready": count("Agents that serve."),
                    "updated": count("Agents that run what the spec says now."),
                    "image": text("Image that they shall run.", max_length=1024),
                    "enginesWithoutAgent": count(
                        "Engines of the pool on nodes without a ready agent: they serve uncached."
                    ),
                },
            ),
            "unhealthyNodes": items(
                "Nodes whose agent does not serve, at most 10.",
                struct(
                    "A node.",
                    {
                        "name": text("Its name.", max_length=NAME_MAX),
                        "reason": text("Why.", max_length=64),
                        "message": text("For people.", max_length=1024),
                    },
                    required=["name", "reason"],
                ),
                max_items=10,
                **{LIST_TYPE: "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
            "valkey": struct(
                "The managed Valkey.",
                {
                    "shards": count("Shards wanted."),
                    "ready": count("Shards that serve their slots."),
                    "slotsCovered": count("Slots of 16384 that a shard serves."),
                },
            ),
            "workloads": struct(
                "Pods labelled `kvpool.io/inject` that name this pool, in namespaces that it allows: pods elsewhere "
                "(NamespaceNotAllowed) are not counted.",
                {
                    "injected": count("With the connector."),
                    "skipped": count("Without, for the reason in their annotation kvpool.io/skip-reason."),
                    "webhookMissed": count("That the webhook never saw: restart them once it is up."),
                },
            ),
            "routing": struct("The router.", {"url": text("Where clients connect.", max_length=512)}),
        },
    )


def _condition() -> Schema:
    return struct(
        "A condition.",
        {
            "type": text("Its type.", max_length=316, pattern="^[A-Za-z]+$"),
            "status": choice("Whether it holds.", "True", "False", "Unknown"),
            "reason": text("Why, in one word.", max_length=1024, pattern="^[A-Za-z]([A-Za-z0-9]*)?$"),
            "message": text("Why, for people, with the remedy.", max_length=32768),
            "lastTransitionTime": {
                "type": "string",
                "format": "date-time",
                "description": "When status last changed.",
            },
            "observedGeneration": {
                "type": "integer",
                "format": "int64",
                "minimum": 0,
                "description": "The generation that it is about.",
            },
        },
        required=["type", "status", "reason", "message", "lastTransitionTime"],
    )
