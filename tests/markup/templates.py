"""Chat templates as models have them, reduced to what matters for spans."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims every content, like Llama 3's.
LLAMA3 = (
    "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
# Walks over content parts, so vLLM hands it the parts themselves.
OPENAI = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content.strip() }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Documents as turns of their own with the same frame around each, like Granite's.
GRANITE = (
    "{% for d in documents or [] %}<|im_start|>document\n{{ d.text }}<|im_end|>\n{% endfor %}"
    + CHATML
)
# Documents numbered, every key written out, like Command-R's.
COMMAND_R = (
    "{% if documents %}<results>{% for d in documents %}\nDocument: {{ loop.index0 }}\n"
    "{% for key, value in d.items() %}{{ key }}: {{ value }}\n{% endfor %}{% endfor %}</results>\n"
    "{% endif %}" + CHATML
)
# Documents as JSON.
JSON = "{% for d in documents or [] %}{{ d | tojson }}\n{% endfor %}" + CHATML

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "openai": OPENAI,
    "granite": GRANITE,
    "command-r": COMMAND_R,
    "json": JSON,
}
WITH_DOCUMENTS = ("granite", "command-r", "json")
