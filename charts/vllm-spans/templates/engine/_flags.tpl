{{/*
Flags in engine.args that cannot be there: those that other values set (the later one would win in silence, and probes,
Service and checks would not know), and those that an engine with spans refuses at its start.
*/}}
{{- define "vllm-spans.flags.check" -}}
{{- $values := dict
  "--model" "model.name"
  "--served-model-name" "model.servedName"
  "--revision" "model.revision"
  "--max-model-len" "model.maxLength"
  "--api-key" "engine.apiKeySecret, which keeps it out of what is listed"
  "--tensor-parallel-size" "engine.tensorParallelSize"
  "-tp" "engine.tensorParallelSize"
  "--nnodes" "engine.nodes"
  "--node-rank" "engine.nodes"
  "--master-addr" "engine.nodes"
  "--headless" "engine.nodes"
  "--shutdown-timeout" "engine.drainSeconds"
  "--kv-transfer-config" "offload"
  "--host" "nothing: probes and Service reach an engine at the pod's address"
  "--port" "service.port; an engine itself listens on 8000"
-}}
{{- $refused := dict
  "--pipeline-parallel-size" "it is not verified with spans. Use engine.tensorParallelSize"
  "-pp" "it is not verified with spans. Use engine.tensorParallelSize"
  "--speculative-config" "the drafter would read K before its rotation. Remove it"
  "--no-enable-chunked-prefill" "spans need chunked prefill. Remove it"
  "--no-enable-prefix-caching" "spans live in the prefix cache. Remove it"
  "--enable-prompt-embeds" "spans are keyed by tokens. Remove it"
-}}
{{- $offload := dict -}}
{{- if or .Values.offload.cpu.enabled .Values.offload.shared.enabled -}}
{{- range $flag := list "--data-parallel-size" "-dp" -}}
{{- $_ := set $offload $flag "the tiers are not verified with data parallelism. Raise engine.replicas instead, or switch offload off" -}}
{{- end -}}
{{- end -}}
{{- if .Values.offload.shared.enabled -}}
{{- $_ := set $offload "--enable-lora" "the files of offload.shared know an adapter by its name alone. Remove it, or switch offload.shared off" -}}
{{- $_ := set $offload "--enable-sleep-mode" "weights could change under the files of offload.shared. Remove it, or switch offload.shared off" -}}
{{- end -}}
{{- range $arg := .Values.engine.args -}}
{{- /* vLLM takes underscores for dashes. */ -}}
{{- $flag := regexReplaceAll "[= ].*$" $arg "" | trim | replace "_" "-" -}}
{{- with get $values $flag -}}
{{- fail (printf "engine.args has %s, which the chart sets. Use %s." $flag .) -}}
{{- end -}}
{{- with get (merge $offload $refused) $flag -}}
{{- fail (printf "engine.args has %s: %s." $flag .) -}}
{{- end -}}
{{- end -}}
{{- end }}
