{{/*
Names. They are cut so that what is appended (-exporter, -loadtest-1a2b3c4d, a dashboard's name) stays within the 63
characters of a label.
*/}}
{{- define "vllm-spans.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 44 | trimSuffix "-" }}
{{- end }}

{{- define "vllm-spans.fullname" -}}
{{- $name := include "vllm-spans.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 44 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 44 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 44 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/*
Labels that choose a part's pods. They never change: a Deployment's selector is immutable. Argument: root, component.
*/}}
{{- define "vllm-spans.selectorLabels" -}}
app.kubernetes.io/name: {{ include "vllm-spans.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of an object's metadata. Argument: root, component, and further labels as extra. */}}
{{- define "vllm-spans.labels" -}}
{{ include "vllm-spans.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* An image's reference, by its digest if it has one. Argument: root, image. */}}
{{- define "vllm-spans.image" -}}
{{- with .image.registry }}{{ . }}/{{ end -}}
{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* Fields of a pod's spec, or nothing. */}}
{{- define "vllm-spans.pullSecrets" -}}
{{- with .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

{{/* Where pods may run. Argument: a part's values. */}}
{{- define "vllm-spans.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* The images run under any user that is not root: OpenShift chooses one, elsewhere it is the image's own. */}}
{{- define "vllm-spans.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "vllm-spans.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A number as it was written, or a text. Numbers of values files are floats, and a large one would print as 1e+06. */}}
{{- define "vllm-spans.plain" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end }}

{{/* Quantities are texts: old API servers take nothing else from a server-side apply. Argument: requests and limits. */}}
{{- define "vllm-spans.resources" -}}
{{- $found := dict -}}
{{- range $kind, $each := . -}}
{{- $texts := dict -}}
{{- range $name, $quantity := $each -}}
{{- $_ := set $texts $name (include "vllm-spans.plain" $quantity) -}}
{{- end -}}
{{- $_ := set $found $kind $texts -}}
{{- end -}}
{{ toYaml $found }}
{{- end }}
