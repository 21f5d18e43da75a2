{{/* Seconds of a Prometheus duration such as 1m30s. */}}
{{- define "vllm-spans.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h|d)" . -1 -}}
{{- $number := regexFind "^[0-9]+" . -}}
{{- $sum = addf $sum (mulf (float64 $number) (get $units (trimPrefix $number .))) -}}
{{- end -}}
{{ $sum }}
{{- end }}

{{/* Prometheus takes no scrape that may last longer than the pause between two; it would keep its former configuration. */}}
{{- define "vllm-spans.scrape.check" -}}
{{- if gt (include "vllm-spans.seconds" .values.scrapeTimeout | float64) (include "vllm-spans.seconds" .values.interval | float64) -}}
{{- fail (printf "monitoring.%s.scrapeTimeout (%s) is longer than its interval (%s), which Prometheus refuses. Lower scrapeTimeout or raise interval." .name .values.scrapeTimeout .values.interval) -}}
{{- end -}}
{{- end }}
