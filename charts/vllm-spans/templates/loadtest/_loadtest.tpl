{{- define "vllm-spans.loadtest.name" -}}
{{ include "vllm-spans.fullname" . }}-loadtest
{{- end }}

{{- define "vllm-spans.loadtest.url" -}}
{{ .Values.loadtest.url | default (printf "http://%s.%s.svc:%v" (include "vllm-spans.fullname" .) .Release.Namespace .Values.service.port) }}
{{- end }}

{{/* Text of the workload: the values' own, or the file of that name. */}}
{{- define "vllm-spans.loadtest.workload" -}}
{{- with .Values.loadtest -}}
{{- if .workloadText -}}
{{ .workloadText }}
{{- else -}}
{{- $path := printf "files/workloads/%s.toml" .workload -}}
{{- $known := list -}}
{{- range $each, $_ := $.Files.Glob "files/workloads/*.toml" -}}
{{- $known = append $known (base $each | trimSuffix ".toml") -}}
{{- end -}}
{{- if not (has .workload $known) -}}
{{- fail (printf "loadtest.workload: there is no workload %s. Take one of %s, or write your own into loadtest.workloadText." .workload (join ", " $known)) -}}
{{- end -}}
{{ $.Files.Get $path }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "vllm-spans.loadtest.check" -}}
{{- with .Values.loadtest -}}
{{- $text := include "vllm-spans.loadtest.workload" $ -}}
{{- $kind := regexFind "(?m)^kind *= *\"(trace|questions)\"" $text -}}
{{- if and $kind (not .data.claim) -}}
{{- fail (printf "loadtest.workload sends recorded data (%s), and loadtest.data.claim is empty: the chart brings no data. Name a PersistentVolumeClaim that holds the file and its path in loadtest.data.path." $kind) -}}
{{- end -}}
{{- if and .data.claim (not .data.path) -}}
{{- fail "loadtest.data.path is empty: name the file in the volume of loadtest.data.claim." -}}
{{- end -}}
{{- $autoscaled := or $.Values.autoscaling.hpa.enabled $.Values.autoscaling.keda.enabled -}}
{{- if and .counters (or $autoscaled (gt (int $.Values.engine.replicas) 1)) -}}
{{- fail "loadtest.counters compares the client's counts with one server's, and several engines answer behind the Service: each reading would be another one's. Clear loadtest.counters, or set engine.replicas to 1 without autoscaling." -}}
{{- end -}}
{{- $cpu := dig "limits" "cpu" "" .resources | toString -}}
{{- if $cpu -}}
{{- $cores := ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) (hasSuffix "m" $cpu) -}}
{{- if lt $cores (float64 .workers) -}}
{{- fail (printf "loadtest.workers is %v and loadtest.resources.limits.cpu is %s: a worker may use a whole core, and one that is throttled measures itself. Raise the limit or lower loadtest.workers." .workers $cpu) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
