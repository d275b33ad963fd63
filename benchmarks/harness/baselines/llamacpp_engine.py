"""llama.cpp as an engine."""

from pathlib import Path

import numpy as np

from .prompts import distinct
from .weights import conversion_of


class LlamaCpp:
    """llama.cpp through the low-level interface of llama-cpp-python: one stream of KV cells per row."""

    chunk = 2048  # prompt tokens handed over at once; llama.cpp computes them 512 at a time

    def __init__(self, directory: Path, threads: int, precision: str) -> None:
        import llama_cpp

        self.library = library = llama_cpp
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        name = conversion_of("llamacpp", precision)
        kind = name.removesuffix(".gguf").partition("-")[2]
        self.detail = "" if precision == "float32" else f"{kind} weights, f16 KV"
        self.threads, self.context = threads, None
        self.kv_type = library.GGML_TYPE_F32 if precision == "float32" else library.GGML_TYPE_F16
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(
            str(directory / name).encode(), library.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {directory / name}")
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self.batch = library.llama_batch_init(self.chunk, 0, 1)

    def open(self, batch: int, capacity: int) -> None:
        library = self.library
        if self.context:
            library.llama_free(self.context)
        parameters = library.llama_context_default_params()
        parameters.n_ctx = batch * -(-capacity // 256) * 256
        parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = self.chunk, 512, batch
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = self.kv_type
        # Flash attention rounds to float16 whatever the KV type, and decodes slower than plain attention.
        parameters.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.kv_unified = False
        self.context = library.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {batch} × {capacity} tokens")

    def _feed(
        self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, with_logits: np.ndarray
    ) -> np.ndarray:
        """Evaluate tokens (all arguments `[n]`); the greedy next token after each of those wanted."""
        batch, size = self.batch, len(tokens)
        batch.n_tokens = size
        for field, values in ((batch.token, tokens), (batch.pos, positions), (batch.logits, with_logits)):
            np.ctypeslib.as_array(field, (size,))[:] = values
        np.ctypeslib.as_array(batch.n_seq_id, (size,))[:] = 1
        for index, row in enumerate(rows):
            batch.seq_id[index][0] = row
        status = self.library.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if not with_logits.any():
            return np.empty(0, np.int32)
        logits = np.ctypeslib.as_array(
            self.library.llama_get_logits(self.context), (int(with_logits.sum()), self.vocabulary)
        )
        return logits.argmax(-1)

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        memory = self.library.llama_get_memory(self.context)
        self.library.llama_memory_clear(memory, True)
        context, read, tokens = prompts.shape[1], distinct(prompts), []
        for row, prompt in enumerate(read):
            token = np.empty(0, np.int32)
            for start in range(0, context, self.chunk):
                positions = np.arange(start, min(start + self.chunk, context))
                with_logits = positions == context - 1
                token = self._feed(prompt[positions], positions, np.full_like(positions, row), with_logits)
            tokens.append(token)
        copies = len(prompts) // len(read)
        for row in range(len(read), len(prompts)):
            self.library.llama_memory_seq_cp(memory, 0, row, -1, -1)
        self.length, self.token, self.tokens_read = context, np.concatenate(tokens * copies), read.size
        return self.token

    def decode(self, steps: int) -> np.ndarray:
        rows, tokens = np.arange(len(self.token)), []
        for _ in range(steps):
            self.token = self._feed(self.token, np.full_like(rows, self.length), rows, np.ones_like(rows))
            self.length += 1
            tokens.append(self.token)
        return np.stack(tokens, 1)

    warm = decode
