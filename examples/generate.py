"""Batch generation from Python, with the entropy of every token.

python examples/generate.py
"""

import argparse

from entropic_jax import LLM, SamplingParams

PROMPTS = ["def binary_search(items, target):\n", "import numpy as np\n\n\ndef softmax(x):\n"]


def main() -> None:
    with LLM(max_num_seqs=4) as llm:  # the embedded model; or the path of a Hugging Face directory
        for output in llm.generate(
            PROMPTS, SamplingParams(temperature=0.6, top_p=0.95, max_tokens=48, seed=0)
        ):
            (completion,) = output.outputs
            print(f"{output.prompt}{completion.text}\n# {completion.finish_reason},", end=" ")
            print(f"mean entropy {completion.summary['mean_entropy']:.2f} nats,", end=" ")
            print(f"largest {max(completion.trace['entropy']):.2f} nats\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
