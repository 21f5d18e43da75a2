{{- define "vllm-spans.exporter.name" -}}
{{ include "vllm-spans.fullname" . }}-exporter
{{- end }}

{{- define "vllm-spans.exporter.serviceAccount" -}}
{{- if .Values.exporter.serviceAccount.create -}}
{{ .Values.exporter.serviceAccount.name | default (include "vllm-spans.exporter.name" .) }}
{{- else -}}
{{ .Values.exporter.serviceAccount.name }}
{{- end -}}
{{- end }}

{{/* Namespaces that are watched, as JSON. */}}
{{- define "vllm-spans.exporter.namespaces" -}}
{{ .Values.exporter.namespaces | default (list .Release.Namespace) | uniq | toJson }}
{{- end }}

{{/* Label selector of the pods: unless another is given, the engine pods of this release. */}}
{{- define "vllm-spans.exporter.selector" -}}
{{- if .Values.exporter.selector -}}
{{ .Values.exporter.selector }}
{{- else -}}
{{- $terms := list -}}
{{- range $label, $value := include "vllm-spans.selectorLabels" (dict "root" . "component" "engine") | fromYaml -}}
{{- $terms = append $terms (printf "%s=%s" $label $value) -}}
{{- end -}}
{{ join "," $terms }}
{{- end -}}
{{- end }}

{{/* What the exporter would refuse at its start, said before anything is installed. */}}
{{- define "vllm-spans.exporter.check" -}}
{{- with .Values.exporter -}}
{{- if ge (float64 .timeout) (float64 .interval) -}}
{{- fail (printf "exporter.timeout (%v) must be less than exporter.interval (%v): a scrape has to end before the next begins. Lower exporter.timeout or raise exporter.interval." .timeout .interval) -}}
{{- end -}}
{{- if lt (float64 .window) (mulf 2 .interval) -}}
{{- fail (printf "exporter.window (%v) must be at least twice exporter.interval (%v), or the ratios have no increment to be made of. Raise exporter.window or lower exporter.interval." .window .interval) -}}
{{- end -}}
{{- if and .allNamespaces .namespaces -}}
{{- fail "exporter.allNamespaces and exporter.namespaces exclude each other. Clear one of them." -}}
{{- end -}}
{{- if not (or .serviceAccount.create .serviceAccount.name) -}}
{{- fail "exporter.serviceAccount.create is false and exporter.serviceAccount.name is empty: the exporter would run as the namespace's default account. Name an account that may list and watch pods, or set exporter.serviceAccount.create." -}}
{{- end -}}
{{- end -}}
{{- end }}
