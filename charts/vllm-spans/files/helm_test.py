"""What `helm test` runs: the release serves its model, and reuses a document behind another question."""

import json
import os
import sys
import urllib.error
import urllib.request

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
DOCUMENT = {
    "title": "Tides",
    "text": "The moon pulls the sea, and the sea rises twice a day. " * 12,
}


def ask(path, body=None):
    """Answer of the server as JSON."""
    headers = {"Content-Type": "application/json"}
    if "API_KEY" in os.environ:
        headers["Authorization"] = "Bearer " + os.environ["API_KEY"]
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{URL}{path}: HTTP {error.code} {error.read().decode()[:500]}")
    except OSError as error:
        sys.exit(
            f"{URL}{path}: {error}; is an engine ready? kubectl get pods, kubectl describe pod"
        )


def chat(number):
    """Usage of an answer about the document, behind a text that is new each time: a prefix cache finds nothing."""
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": f"{number} is the number of this conversation."},
            {"role": "user", "content": "What pulls the sea?"},
        ],
        "documents": [DOCUMENT],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = ask("/v1/chat/completions", body)
    if not answer["choices"][0]["message"]["content"]:
        sys.exit(f"the answer is empty: {answer}")
    return answer["usage"]


names = [model["id"] for model in ask("/v1/models")["data"]]
if MODEL not in names:
    sys.exit(f"{URL} serves {names}, not {MODEL}")
# Several engines answer in turn, so the document is asked about until one has it.
for number in range(12):
    usage = chat(number)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if cached:
        print(f"{MODEL} answers; {cached} of {usage['prompt_tokens']} tokens were reused")
        break
else:
    sys.exit(
        "every answer computed the document anew: are spans on? kubectl logs of an engine tells"
    )
