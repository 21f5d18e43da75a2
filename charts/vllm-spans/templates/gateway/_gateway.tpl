{{- define "vllm-spans.epp.name" -}}
{{ include "vllm-spans.fullname" . }}-epp
{{- end }}

{{/* Service of the endpoint picker: the chart's own, or one that exists. */}}
{{- define "vllm-spans.epp.service" -}}
{{- if .Values.inferencePool.endpointPicker.create -}}
{{ include "vllm-spans.epp.name" . }}
{{- else -}}
{{ .Values.inferencePool.endpointPicker.service }}
{{- end -}}
{{- end }}

{{/* Is there a picker to install? */}}
{{- define "vllm-spans.epp.enabled" -}}
{{- if and .Values.inferencePool.enabled .Values.inferencePool.endpointPicker.create -}}true{{- end -}}
{{- end }}

{{- define "vllm-spans.pool.check" -}}
{{- $pool := .Values.inferencePool -}}
{{- $picker := $pool.endpointPicker -}}
{{- if and $picker.create (not $picker.image.repository) -}}
{{- fail "inferencePool.endpointPicker.image.repository is empty: no release of a picker suits every gateway. Name the image of your llm-d release (llm-d-inference-scheduler) or of the Gateway API inference extension (epp), or set inferencePool.endpointPicker.create to false and name a Service in inferencePool.endpointPicker.service." -}}
{{- end -}}
{{- if and $picker.create (not (or $picker.image.tag $picker.image.digest)) -}}
{{- fail "inferencePool.endpointPicker.image has neither tag nor digest: the picker has versions of its own. Set inferencePool.endpointPicker.image.tag or .digest." -}}
{{- end -}}
{{- if and (not $picker.create) (not $picker.service) -}}
{{- fail "inferencePool.endpointPicker.create is false and inferencePool.endpointPicker.service is empty: a pool needs a picker. Name the Service of one in this namespace, or set inferencePool.endpointPicker.create." -}}
{{- end -}}
{{- end }}
