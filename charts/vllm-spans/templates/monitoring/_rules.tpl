{{/*
The groups of all rule files, without the alerts that are switched off. The files are data: Prometheus's own braces in
them are never read as Helm's.
*/}}
{{- define "vllm-spans.rules" -}}
{{- $values := .Values.monitoring.rules -}}
{{- $groups := list -}}
{{- $known := list -}}
{{- range $path, $_ := .Files.Glob "files/rules/*.yaml" -}}
  {{- range ($.Files.Get $path | fromYaml).groups -}}
    {{- $rules := list -}}
    {{- range .rules -}}
      {{- if .alert -}}
        {{- $known = append $known .alert -}}
        {{- if $values.alertLabels -}}
          {{- $_ := set . "labels" (merge (deepCopy $values.alertLabels) (.labels | default dict)) -}}
        {{- end -}}
        {{- if $values.runbook -}}
          {{- $_ := set .annotations "runbook_url" (.annotations.runbook_url | replace "docs/runbook.md" $values.runbook) -}}
        {{- end -}}
      {{- end -}}
      {{- if not (has .alert $values.disabled) -}}
        {{- $rules = append $rules . -}}
      {{- end -}}
    {{- end -}}
    {{- if $rules -}}
      {{- $groups = append $groups (merge (dict "rules" $rules) .) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $values.disabled -}}
  {{- if not (has . $known) -}}
    {{- fail (printf "monitoring.rules.disabled: there is no alert %s. The alerts are: %s." . (join ", " $known)) -}}
  {{- end -}}
{{- end -}}
{{ toYaml $groups }}
{{- end }}
