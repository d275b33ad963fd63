"""Load for any OpenAI-compatible server, and what it did under it: the body of `entropic bench`.

`arrivals` says when requests come and how long they are, `prompts` what is in them, `client` sends one and
notes when its tokens came, `load` sends them all, `measures` and `report` say what was seen.
"""
