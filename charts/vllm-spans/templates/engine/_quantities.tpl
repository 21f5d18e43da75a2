{{/* Bytes of a Kubernetes quantity such as 4Gi. Argument: the quantity. */}}
{{- define "vllm-spans.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) | int64 -}}
{{- end }}

{{/* Bytes that the CPU tier takes from /dev/shm. Files pass through it, so it is never zero with a shared volume. */}}
{{- define "vllm-spans.tierBytes" -}}
{{- if .Values.offload.cpu.enabled -}}
{{ include "vllm-spans.bytes" .Values.offload.cpu.size }}
{{- else if .Values.offload.shared.enabled -}}
268435456
{{- else -}}
0
{{- end -}}
{{- end }}
