"""Batch generation from Python, with what was measured at every token.

python examples/generate.py
"""

import jax
import numpy as np

import entropic_jax as ej
from entropic_jax import models
from entropic_jax.serving.generation import EMBEDDED

PROMPTS = ["def binary_search(items, target):\n", "import numpy as np\n\n\ndef softmax(x):\n"]


def main() -> None:
    model = models.load(EMBEDDED)
    assert model.tokenizer is not None
    decoder, controller = model.decoder, ej.chain()  # the null controller: plain sampling
    prompts = [model.tokenizer.encode(text) for text in PROMPTS]
    state = ej.start(
        decoder,
        model.params,
        controller,
        ej.allocate(decoder.shape, rows=len(prompts), context=512),
        prompts,
        key=jax.random.key(0),
        max_tokens=48,
        sample=ej.parameters(len(prompts), temperature=0.6, top_p=0.95),
        stop=[model.stop_tokens] * len(prompts),
    )
    state, trace = ej.generate(decoder, model.params, controller, state, 48)  # one launch, one compilation
    for row, prompt in enumerate(PROMPTS):
        emitted = np.asarray(trace.emitted[:, row])
        print(prompt + model.tokenizer.decode(np.asarray(trace.token[:, row])[emitted].tolist()))
        print(f"# mean entropy {np.asarray(trace.entropy[:, row])[emitted].mean():.2f} nats,", end=" ")
        print(f"entropic time {float(state.ledger.entropic_time[row]):.1f} nats\n")


if __name__ == "__main__":
    main()
