{{/* Start of every name: the release's, with the chart's where it does not hold it. */}}
{{- define "spottrain.name" -}}
{{- if contains "spottrain" .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-spottrain" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* What values.schema.json could only refuse with a regular expression. */}}
{{- define "spottrain.check" -}}
{{- range .Values.watchNamespaces }}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$" .) }}
{{- fail (printf "watchNamespaces: %q is no name of a namespace: use lower-case letters, digits and -, 63 at most" .) }}
{{- end }}
{{- end }}
{{- with .Values.agent.namespace }}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$" .) }}
{{- fail (printf "agent.namespace: %q is no name of a namespace: use lower-case letters, digits and -, 63 at most" .) }}
{{- end }}
{{- end }}
{{- with .Values.agent.metadataEndpoint }}
{{- if not (regexMatch "^https?://[^/]+/?$" .) }}
{{- fail (printf "agent.metadataEndpoint: %q is no URL of a server: write it as http://169.254.169.254" .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "spottrain.agentNamespace" -}}
{{ .Values.agent.namespace | default .Release.Namespace }}
{{- end }}

{{/* (dict "root" . "component" "operator") */}}
{{- define "spottrain.selector" -}}
app.kubernetes.io/name: spottrain
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "spottrain.labels" -}}
{{ include "spottrain.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "spottrain.image" -}}
image: {{ printf "%s:%s" .Values.image.operator.repository (.Values.image.operator.tag | default .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.image.operator.pullPolicy }}
{{- end }}

{{/* Both as the Pod Security Standard "restricted" asks. */}}
{{- define "spottrain.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "spottrain.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/*
A role for one service account: in each of watchNamespaces, or where that is empty, or "everywhere" is set, in the
whole cluster.
(dict "root" . "component" "agent" "namespace" "where the account is" "rules" (list of rules) "annotations" (dict))
*/}}
{{- define "spottrain.access" -}}
{{- $name := printf "%s-%s" (include "spottrain.name" .root) .component }}
{{- $annotations := .annotations }}
{{- $labels := include "spottrain.labels" . }}
{{- $scopes := ternary (list "") (.root.Values.watchNamespaces | default (list "")) (.everywhere | default false) }}
{{- range $scope := $scopes }}
{{- $meta := dict "name" $name "labels" ($labels | fromYaml) }}
{{- if $scope }}{{ $_ := set $meta "namespace" $scope }}{{ end }}
{{- if $annotations }}{{ $_ := set $meta "annotations" $annotations }}{{ end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ ternary "Role" "ClusterRole" (ne $scope "") }}
metadata: {{- $meta | toYaml | nindent 2 }}
rules: {{- $.rules | toYaml | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ ternary "RoleBinding" "ClusterRoleBinding" (ne $scope "") }}
metadata: {{- $meta | toYaml | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ ternary "Role" "ClusterRole" (ne $scope "") }}
  name: {{ $name }}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ $.namespace }}}
{{- end }}
{{- end }}
