{{/* The pods of one engine talk to each other at ports that nobody chose. Argument: root, side (from or to). */}}
{{- define "vllm-spans.peers" -}}
- {{ .side }}:
    {{- range $component := list "engine" "worker" }}
    - podSelector:
        matchLabels:
          {{- include "vllm-spans.selectorLabels" (dict "root" $.root "component" $component) | nindent 10 }}
    {{- end }}
{{- end }}
