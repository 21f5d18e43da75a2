"""``vllm-spans warm``: the spans of a corpus, computed ahead of the requests over them."""
