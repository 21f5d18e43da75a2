{{/* Rules of NetworkPolicies: where a part's pods may connect to. */}}
{{- define "vllm-spans.egress.dns" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end }}

{{/* The API server has an address that no selector can name; these are its usual ports. */}}
{{- define "vllm-spans.egress.apiServer" -}}
- ports:
    - port: 443
      protocol: TCP
    - port: 6443
      protocol: TCP
{{- end }}

{{- define "vllm-spans.egress.engines" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "vllm-spans.selectorLabels" (dict "root" . "component" "engine") | nindent 10 }}
  ports:
    - port: 8000
      protocol: TCP
{{- end }}
