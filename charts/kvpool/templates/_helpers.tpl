{{/* Name of the namespaced objects: the release's, which contains the chart's or is completed by it. */}}
{{- define "kvpool.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvpool.operatorName" -}}
{{- printf "%s-operator" (include "kvpool.fullname" .) -}}
{{- end -}}

{{/* Cluster-scoped names that are the same in every release: one operator per cluster, a second release is refused by Helm. */}}
{{- define "kvpool.agentRole" -}}kvpool-agent{{- end -}}
{{- define "kvpool.routerRole" -}}kvpool-router{{- end -}}
{{- define "kvpool.webhookConfiguration" -}}kvpool.kvpool.io{{- end -}}

{{- define "kvpool.preDeleteName" -}}
{{- printf "%s-pre-delete" (include "kvpool.fullname" .) -}}
{{- end -}}

{{/* What selects the operator's pods. Never changes in a release's life. */}}
{{- define "kvpool.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* Labels of every object of the chart, without the component. */}}
{{- define "kvpool.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Reference of an image: list of the root context, the image's values and its default tag. */}}
{{- define "kvpool.reference" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := $root.Values.global.imageRegistry | default $image.registry -}}
{{- $repository := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository ($image.tag | default (index . 2)) -}}
{{- end -}}
{{- end -}}

{{- define "kvpool.image" -}}
{{- include "kvpool.reference" (list . .Values.image .Chart.AppVersion) -}}
{{- end -}}

{{- define "kvpool.valkeyImage" -}}
{{- include "kvpool.reference" (list . .Values.valkey.image "") -}}
{{- end -}}

{{/* What all pods of the chart have in common. */}}
{{- define "kvpool.podSpec" -}}
{{- with uniq (concat .Values.global.imagePullSecrets .Values.image.pullSecrets) }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .Values.operator.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.operator.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "kvpool.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Annotations of the pre-delete hook's objects; argument: the weight. One that failed stays, for its log. */}}
{{- define "kvpool.preDeleteAnnotations" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
