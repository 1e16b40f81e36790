{{/* Start of every name: the release's, with the chart's where it does not hold it. */}}
{{- define "spottrain.name" -}}
{{- if contains "spottrain" .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-spottrain" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* What values.schema.json cannot say, because it is about several values. */}}
{{- define "spottrain.check" -}}
{{- $known := list }}
{{- range $.Values.pools }}{{ $known = append $known .name }}{{ end }}
{{- range (.Values.jobDefaults | default dict).pools }}
{{- if not (has . $known) }}
{{- fail (printf "jobDefaults.pools: %q is not in pools" .) }}
{{- end }}
{{- end }}
{{- range $where := list "operator" "agent" }}
{{- range (get $.Values $where).extraEnv }}
{{- if hasPrefix "SPOTTRAIN_" .name }}
{{- fail (printf "%s.extraEnv: %s is set by the chart: use its values, such as operator.tuning" $where .name) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.networkPolicy.trainers }}
{{- if and .enabled (not .namespaces) (not $.Values.watchNamespaces) }}
{{- fail "networkPolicy.trainers: a NetworkPolicy belongs to a namespace: name them in networkPolicy.trainers.namespaces" }}
{{- end }}
{{- range .namespaces }}
{{- if and $.Values.watchNamespaces (not (has . $.Values.watchNamespaces)) }}
{{- fail (printf "networkPolicy.trainers.namespaces: %q is not in watchNamespaces, so no trainer of this release is there" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not .Values.metrics.from }}
{{- $reads := or .Values.metrics.service.enabled .Values.metrics.podMonitor.enabled }}
{{- $trainers := and .Values.metrics.podMonitor.enabled .Values.metrics.podMonitor.trainers }}
{{- if and $reads .Values.networkPolicy.operator.enabled }}
{{- fail "metrics.from: metrics.service or metrics.podMonitor is enabled, but networkPolicy.operator lets nobody read metrics: name Prometheus in metrics.from, or set networkPolicy.operator.enabled=false" }}
{{- end }}
{{- if and $trainers .Values.networkPolicy.trainers.enabled }}
{{- fail "metrics.from: metrics.podMonitor.trainers is enabled, but networkPolicy.trainers lets only the operator read metrics: name Prometheus in metrics.from, or set networkPolicy.trainers.enabled=false" }}
{{- end }}
{{- end }}
{{- with .Values.test.namespace }}
{{- if and $.Values.watchNamespaces (not (has . $.Values.watchNamespaces)) }}
{{- fail (printf "test.namespace: %q is not in watchNamespaces, so the operator would not see the job" .) }}
{{- end }}
{{- end }}
{{- with .Values.priceJob }}
{{- if and .enabled (not .fromNodes) (or (not .regions) (not .instanceTypes)) }}
{{- fail "priceJob: without fromNodes, name regions and instanceTypes to price" }}
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

{{/* (dict "root" . "image" "operator"): by its digest where there is one, else by its tag; beside the operator's image where
no repository is named. */}}
{{- define "spottrain.imageName" -}}
{{- $image := get .root.Values.image .image -}}
{{- $registry := regexReplaceAll "[^/]*$" .root.Values.image.operator.repository "" -}}
{{- $repository := $image.repository | default (printf "%sspottrain-%s" $registry .image) -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository ($image.tag | default .root.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{- define "spottrain.image" -}}
image: {{ include "spottrain.imageName" (dict "root" . "image" "operator") }}
imagePullPolicy: {{ .Values.image.operator.pullPolicy }}
{{- end }}

{{/* Metadata of a pod: its part's own labels and annotations come before those of all pods, and the chart's before both.
(dict "root" . "component" "operator" "own" .Values.operator) */}}
{{- define "spottrain.podMetadata" -}}
labels: {{- merge (include "spottrain.labels" . | fromYaml) (.own.podLabels | default dict) (.root.Values.podLabels | default dict) | toYaml | nindent 2 }}
{{- with merge dict (.own.podAnnotations | default dict) (.root.Values.podAnnotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "spottrain.serviceAccount" -}}
{{- with .serviceAccount.annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* By what EKS, Karpenter, GKE, AKS and kOps tell that a node is spot. */}}
{{- define "spottrain.spotLabels" -}}
- {key: eks.amazonaws.com/capacityType, value: SPOT}
- {key: karpenter.sh/capacity-type, value: spot}
- {key: cloud.google.com/gke-spot, value: "true"}
- {key: cloud.google.com/gke-preemptible, value: "true"}
- {key: kubernetes.azure.com/scalesetpriority, value: spot}
- {key: node-role.kubernetes.io/spot-worker, value: "true"}
{{- end }}

{{/* All trainer pods, of every job. */}}
{{- define "spottrain.trainers" -}}
app.kubernetes.io/managed-by: spottrain
spottrain.io/role: trainer
{{- end }}

{{- define "spottrain.fetchedPrices" -}}
{{ include "spottrain.name" . }}-fetched-prices
{{- end }}

{{/* What our pods have in common, as the Pod Security Standard "restricted" asks; of "own" where and how they are scheduled.
(dict "root" . "name" "the service account" "own" .Values.operator) */}}
{{- define "spottrain.pod" -}}
serviceAccountName: {{ .name }}
automountServiceAccountToken: true
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "spottrain.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/*
A role for one service account, in each of "scopes" (namespaces; "" is the whole cluster): without them, in each of
watchNamespaces, or where that is empty in the whole cluster. "name" and "account" are RELEASE-COMPONENT where they are not given.
(dict "root" . "component" "agent" "namespace" "where the account is" "rules" (list of rules))
*/}}
{{- define "spottrain.access" -}}
{{- $account := .account | default (printf "%s-%s" (include "spottrain.name" .root) .component) }}
{{- $name := .name | default $account }}
{{- $meta := dict "name" $name "labels" (include "spottrain.labels" . | fromYaml) }}
{{- with .annotations }}{{ $_ := set $meta "annotations" . }}{{ end }}
{{- range $scope := .scopes | default .root.Values.watchNamespaces | default (list "") }}
{{- $kind := ternary "Role" "ClusterRole" (ne $scope "") }}
{{- if $scope }}{{ $_ := set $meta "namespace" $scope }}{{ end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata: {{- $meta | toYaml | nindent 2 }}
rules: {{- $.rules | toYaml | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata: {{- $meta | toYaml | nindent 2 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ $kind }}, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $account }}, namespace: {{ $.namespace }}}
{{- end }}
{{- end }}

{{/* Has an admission policy of this name deny what it refuses. (dict "root" . "component" "agent" "name" "the policy's") */}}
{{- define "spottrain.deny" -}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ .name }}
  labels: {{- include "spottrain.labels" . | nindent 4 }}
spec:
  policyName: {{ .name }}
  validationActions: [Deny]
{{- end }}
