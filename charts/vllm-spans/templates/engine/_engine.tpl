{{/* vLLM's configuration of the connector, as JSON, or nothing. */}}
{{- define "vllm-spans.offload.config" -}}
{{- if or .Values.offload.cpu.enabled .Values.offload.shared.enabled -}}
{{- $extra := dict "cpu_memory" (include "vllm-spans.tierBytes" . | int64) "policy" .Values.offload.policy "load_when" .Values.offload.loadWhen -}}
{{- with .Values.offload.shared -}}
{{- if .enabled -}}
{{- $_ := set $extra "files" "/var/lib/vllm-spans/kv" -}}
{{- $limit := .limit | default .size -}}
{{/* A folder that is as large as its volume leaves no space for the file that is being written. */}}
{{- $bytes := include "vllm-spans.bytes" $limit | int64 -}}
{{- if not .limit -}}
{{- $bytes = div (mul $bytes 9) 10 -}}
{{- end -}}
{{- $_ := set $extra "files_limit" $bytes -}}
{{- end -}}
{{- end -}}
{{- dict "kv_connector" "SpansOffloadingConnector" "kv_connector_module_path" "vllm_spans.offload.connector" "kv_role" "kv_both" "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}
{{- end }}

{{/* Seconds between an engine's removal from the Service and the signal to end: proxies hear of it one after the other. */}}
{{- define "vllm-spans.preStopSeconds" -}}8{{- end }}

{{/* Flags of the server. Argument: root, role (single, leader or worker). */}}
{{- define "vllm-spans.engine.args" -}}
{{- $values := .root.Values -}}
- {{ $values.model.name | quote }}
- --host=0.0.0.0
- --port=8000
- --served-model-name={{ $values.model.servedName | default $values.model.name }}
{{- with $values.model.revision }}
- --revision={{ . }}
{{- end }}
{{- with $values.model.maxLength }}
- --max-model-len={{ . | int64 }}
{{- end }}
- --tensor-parallel-size={{ $values.engine.tensorParallelSize | int64 }}
- --shutdown-timeout={{ $values.engine.drainSeconds | int64 }}
# Usage then tells what was cached and what was padding.
- --enable-prompt-tokens-details
{{- with include "vllm-spans.offload.config" .root }}
- {{ printf "--kv-transfer-config=%s" . | quote }}
{{- end }}
{{- if ne .role "single" }}
- --nnodes={{ $values.engine.nodes | int64 }}
- --master-addr=$(LWS_LEADER_ADDRESS)
- --node-rank=$(LWS_WORKER_INDEX)
{{- end }}
{{- if eq .role "worker" }}
- --headless
{{- end }}
{{- range $values.engine.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "vllm-spans.engine.env" -}}
{{- $values := .Values -}}
- name: VLLM_V1_SPANS_ENABLED
  value: "1"
- name: VLLM_V1_SPANS_GAP_POLICY
  value: {{ $values.spans.gapPolicy | quote }}
{{- with $values.spans.gapLength }}
- name: VLLM_V1_SPANS_GAP_LENGTH
  value: {{ . | int64 | quote }}
{{- end }}
{{- with $values.spans.maxSpans }}
- name: VLLM_V1_SPANS_MAX_SPANS
  value: {{ . | int64 | quote }}
{{- end }}
{{- with $values.spans.delimiter }}
- name: VLLM_V1_SPANS_DELIMITER
  value: {{ . | quote }}
{{- end }}
- name: VLLM_NO_USAGE_STATS
  value: "1"
- name: HF_HOME
  value: /var/cache/vllm-spans/huggingface
{{- if $values.model.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if $values.model.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $values.model.tokenSecret.name }}
      key: {{ $values.model.tokenSecret.key }}
{{- end }}
{{- if $values.engine.apiKeySecret.name }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $values.engine.apiKeySecret.name }}
      key: {{ $values.engine.apiKeySecret.key }}
{{- end }}
{{- with $values.engine.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The path that says that the model is served. With a key it answers only who has it, and probes have none. */}}
{{- define "vllm-spans.engine.readyPath" -}}
{{- if .Values.engine.apiKeySecret.name }}/health{{ else }}/v1/models{{ end -}}
{{- end }}

{{/* What a pod may use, its GPUs among it. Argument: root. */}}
{{- define "vllm-spans.engine.resources" -}}
{{- $found := deepCopy .Values.engine.resources -}}
{{- if gt (int .Values.engine.gpus) 0 -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $found $kind (merge (dict $.Values.engine.gpuResource $.Values.engine.gpus) (get $found $kind | default dict)) -}}
{{- end -}}
{{- end -}}
{{ include "vllm-spans.resources" $found }}
{{- end }}
