"""API server side of spans: the five forms of markup resolved to prompt tokens and span layout."""
