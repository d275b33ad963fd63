"""Load generator for OpenAI-compatible servers, behind `entropic bench`.

`arrivals` decides when requests arrive and how long they are, and `prompts` what they contain. `client` sends
one request and records when its tokens arrive; `load` sends all of them. `measures` computes the figures and
`report` prints and plots them.
"""
