"""Building blocks of the CRD's schema.

Invariant: every string, list and map made here is bounded, so that the cost of CEL rules is.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

RULES = "x-kubernetes-validations"
LABEL_NAME_MAX = 63
LABEL_KEY_MAX = 317
"""Prefix of 253, a slash and a name of 63, less one."""
NAME_MAX = 253
QUANTITY = "^[1-9][0-9]*(Mi|Gi|Ti)$"
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

LABEL_KEY = (
    "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
)
LABEL_VALUE = "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST = "[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?"
ENDPOINT = rf"^({_HOST}|\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]):{_PORT}$"
ENDPOINT_MESSAGE = (
    "an endpoint is host:port, the port from 1 to 65535, an IPv6 address in brackets: write it like "
    "valkey.example.com:6379 or [fd00::1]:6379"
)
_CHARACTERS = "at most 63 letters, digits, '-', '_' and '.' with a letter or digit at both ends"
KEY_MESSAGE = (
    f"a label's key is [prefix/]name, the name of {_CHARACTERS}: write it as kubectl get --show-labels shows it"
)
VALUE_MESSAGE = f"a label's value is empty or of {_CHARACTERS}: write it as kubectl get --show-labels shows it"


def text(description: str, *, max_length: int, **more: Any) -> Schema:
    """A string of at most `max_length` characters."""
    return {"type": "string", "description": description, "maxLength": max_length, **more}


def choice(description: str, *values: str, default: str | None = None) -> Schema:
    """One of some words."""
    given = {} if default is None else {"default": default}
    return {"type": "string", "description": description, "enum": list(values), **given}


def integer(description: str, *, low: int, high: int, **more: Any) -> Schema:
    """A whole number from low to high."""
    return {
        "type": "integer",
        "format": "int32",
        "description": description,
        "minimum": low,
        "maximum": high,
        **more,
    }


def count(description: str) -> Schema:
    """A number of things in status."""
    return {"type": "integer", "format": "int32", "description": description, "minimum": 0}


def struct(
    description: str, properties: Schema, *, required: list[str] | None = None, extra: Schema | None = None
) -> Schema:
    """An object with named fields."""
    needed = {"required": required} if required else {}
    return {"type": "object", "description": description, "properties": properties, **needed, **(extra or {})}


def items(description: str, item: Schema, *, max_items: int, **more: Any) -> Schema:
    """A list."""
    return {"type": "array", "description": description, "items": item, "maxItems": max_items, **more}


def mapping(description: str, value: Schema, *, max_properties: int, **more: Any) -> Schema:
    """A map from strings to `value`."""
    return {
        "type": "object",
        "description": description,
        "additionalProperties": value,
        "maxProperties": max_properties,
        **more,
    }


def labels(description: str, **more: Any) -> Schema:
    """Labels that an object must have; the API server takes no selector with others."""
    value = text("The label's value.", max_length=LABEL_NAME_MAX, **{RULES: [_label_value("self")]})
    return mapping(
        description,
        value,
        max_properties=16,
        **more,
        **{RULES: [rule(f"self.all(key, {_is_label_key('key')})", KEY_MESSAGE)]},
    )


def _label_value(term: str) -> Schema:
    return rule(f"{term}.matches('{LABEL_VALUE}')", VALUE_MESSAGE)


def _is_label_key(term: str) -> str:
    name = f"{term}.split('/')[{term}.split('/').size() - 1]"
    return f"{term}.size() <= {LABEL_KEY_MAX} && {name}.size() <= {LABEL_NAME_MAX} && {term}.matches('{LABEL_KEY}')"


def rule(expression: str, message: str, *, field: str | None = None) -> Schema:
    """A CEL rule; the message names the remedy, the API server names the field."""
    path = {} if field is None else {"fieldPath": field}
    return {"rule": expression, "message": message, **path}


def quantity(description: str, *, low: str, high: str, example: str) -> Schema:
    """A memory quantity between two others."""
    bounded = (
        f"isQuantity(self) && quantity(self).compareTo(quantity('{low}')) >= 0 "
        f"&& quantity(self).compareTo(quantity('{high}')) <= 0"
    )
    return text(
        description,
        max_length=16,
        pattern=QUANTITY,
        **{RULES: [rule(bounded, f"must be from {low} to {high}: write it like {example}")]},
    )


def endpoint(description: str) -> Schema:
    """host:port of a server."""
    expression = "self.matches(r'" + ENDPOINT + "')"
    return text(description, max_length=262, **{RULES: [rule(expression, ENDPOINT_MESSAGE)]})


def cpu(description: str) -> Schema:
    """A CPU quantity: a number or a string."""
    return {
        "description": description,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "pattern": r"^([0-9]+m|[0-9]+(\.[0-9]{1,3})?)$",
        "maxLength": 16,
    }


def label_selector(description: str, *, is_checked: bool = False) -> Schema:
    """metav1.LabelSelector. is_checked: by rules for keys and values; where the API server checks it later, they only cost."""
    plain = mapping(
        "Labels that must be there with these values.",
        text("The label's value.", max_length=LABEL_NAME_MAX),
        max_properties=16,
    )
    return struct(
        description,
        {
            "matchLabels": labels(plain["description"]) if is_checked else plain,
            "matchExpressions": items(
                "Requirements that must all hold.",
                _label_expression() if is_checked else _expression(),
                max_items=16,
                **{"x-kubernetes-list-type": "atomic"},
            ),
        },
        extra={"x-kubernetes-map-type": "atomic"},
    )


def _label_expression() -> Schema:
    schema = _expression()
    schema["properties"]["key"][RULES] = [rule(_is_label_key("self"), KEY_MESSAGE)]
    schema["properties"]["values"]["items"][RULES] = [_label_value("self")]
    return schema


def _expression(*operators: str) -> Schema:
    words = operators or ("In", "NotIn", "Exists", "DoesNotExist")
    return struct(
        "A requirement.",
        {
            "key": text("The label.", max_length=LABEL_KEY_MAX),
            "operator": choice("How values are compared.", *words),
            "values": items(
                "What it is compared with.",
                text("A value.", max_length=LABEL_NAME_MAX),
                max_items=64,
                **{"x-kubernetes-list-type": "atomic"},
            ),
        },
        required=["key", "operator"],
    )


def toleration() -> Schema:
    """corev1.Toleration."""
    return struct(
        "A taint that agents bear.",
        {
            "key": text("The taint's key; empty with operator Exists tolerates all.", max_length=LABEL_KEY_MAX),
            "operator": choice("How the value is compared.", "Exists", "Equal"),
            "value": text("The taint's value.", max_length=LABEL_NAME_MAX),
            "effect": choice(
                "The effect that is tolerated; absent = all.", "NoSchedule", "PreferNoSchedule", "NoExecute"
            ),
            "tolerationSeconds": {
                "type": "integer",
                "format": "int64",
                "description": "How long NoExecute is tolerated; absent = for ever.",
            },
        },
    )


def affinity() -> Schema:
    """corev1.Affinity."""
    return struct(
        "Further rules for the choice of nodes, as in a pod's spec.affinity.",
        {
            "nodeAffinity": _affinity_kind(
                "Nodes by their labels.",
                required=struct(
                    "Node terms, one of which must hold.",
                    {"nodeSelectorTerms": items("The terms.", _node_term(), max_items=16)},
                    required=["nodeSelectorTerms"],
                ),
                preferred=struct(
                    "A node term that is preferred.",
                    {"weight": integer("Its weight.", low=1, high=100), "preference": _node_term()},
                    required=["weight", "preference"],
                ),
            ),
            "podAffinity": _pod_affinity("Nodes by the pods on them."),
            "podAntiAffinity": _pod_affinity("Nodes by the pods not on them."),
        },
    )


def _affinity_kind(description: str, *, required: Schema, preferred: Schema) -> Schema:
    return struct(
        description,
        {
            "requiredDuringSchedulingIgnoredDuringExecution": required,
            "preferredDuringSchedulingIgnoredDuringExecution": items("Preferences.", preferred, max_items=16),
        },
    )


def _node_term() -> Schema:
    expression = _expression("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
    return struct(
        "A node selector term.",
        {
            "matchExpressions": items("Requirements on labels.", expression, max_items=16),
            "matchFields": items("Requirements on fields.", expression, max_items=16),
        },
    )


def _pod_affinity(description: str) -> Schema:
    term = _pod_term()
    return _affinity_kind(
        description,
        required=items("Terms that must all hold.", term, max_items=16),
        preferred=struct(
            "A term that is preferred.",
            {"weight": integer("Its weight.", low=1, high=100), "podAffinityTerm": term},
            required=["weight", "podAffinityTerm"],
        ),
    )


def _pod_term() -> Schema:
    key = text("A label's key.", max_length=LABEL_KEY_MAX)
    return struct(
        "A pod affinity term.",
        {
            "labelSelector": label_selector("The pods."),
            "namespaceSelector": label_selector("Their namespaces, by labels."),
            "namespaces": items("Their namespaces, by name.", text("A name.", max_length=63), max_items=64),
            "topologyKey": text("The node label that makes a place.", max_length=LABEL_KEY_MAX),
            "matchLabelKeys": items("Labels that must be equal.", key, max_items=16),
            "mismatchLabelKeys": items("Labels that must differ.", key, max_items=16),
        },
        required=["topologyKey"],
    )
