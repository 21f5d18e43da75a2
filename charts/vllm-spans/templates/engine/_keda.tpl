{{/* Requests that run or wait in this release's engines. Prometheus 2.x may see vLLM's metrics as vllm_x. */}}
{{- define "vllm-spans.keda.query" -}}
{{- $pods := printf `{namespace="%s",pod=~"%s-.*"}` .Release.Namespace (include "vllm-spans.fullname" .) -}}
sum({__name__=~"vllm[:_]num_requests_(running|waiting)",{{ trimPrefix "{" $pods }})
{{- end }}
