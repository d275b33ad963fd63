"""Sequence factory: from a request to a sequence, its prompt tokens, control, rules and page hashes."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

from entropic_jax import models
from entropic_jax.methods.method import Method

from ..request import RequestError
from ..request.transcript import Transcript
from .adapters import NO_ADAPTER, AdapterSlots, LoadedAdapter
from .detokenizer import detokenizer_factory
from .interface import EngineRequest
from .options import EngineOptions, Sizes
from .output_stream import QueuedOutputStream
from .prefix_cache import PageHash, page_hashes, root_hash
from .request_check import check_adapter, check_prompt, check_request
from .row_controllers import RowControllers
from .sequence import Sequence
from .token_rules import token_rules


class SequenceFactory:
    """Makes the sequences of an engine. May be called from any thread."""

    def __init__(
        self,
        model: models.Model,
        options: EngineOptions,
        sizes: Sizes,
        row_controllers: RowControllers,
        adapters: AdapterSlots | None,
        notify: Callable[[Any], None],
    ) -> None:
        """A factory.

        Args:
            model: with its tokenizer.
            options: the options of the engine.
            sizes: its sizes.
            row_controllers: turns the control of a request into the gains of a row.
            adapters: the LoRA adapters; None where requests may not name any.
            notify: called with the output stream of a request that its reader cancels.
        """
        assert model.tokenizer is not None, "the engine checks it"
        self.model, self.tokenizer, self.options, self.sizes = model, model.tokenizer, options, sizes
        self.method: Method | None = sizes.shapes.method
        self.row_controllers, self.adapters, self.notify = row_controllers, adapters, notify
        self.new_detokenizer = detokenizer_factory(self.tokenizer)

    @property
    def context(self) -> int:
        """Positions of a sequence, prompt and continuation, at most."""
        return min(self.sizes.context, self.sizes.longest)

    def prompt_tokens(self, prompt: Any) -> tuple[int, ...]:
        """A prompt as token ids; RequestError if the model cannot take it."""
        try:
            ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        except models.ModelError as error:
            raise RequestError(f"prompt: {error}", "prompt") from None
        check_prompt(ids, self.context, self.model.decoder.shape.vocabulary)
        return ids

    def sequence(self, engine_request: EngineRequest) -> Sequence:
        """The sequence of a request, which uses its adapter from here on. Raises RequestError."""
        request, vocabulary = engine_request.request, self.model.decoder.shape.vocabulary
        prompt = self.prompt_tokens(request.prompt)
        eos = () if request.ignore_eos else tuple(self.model.stop_tokens)
        stop_tokens = tuple(dict.fromkeys((*eos, *request.stop_token_ids)))
        check_request(engine_request, len(stop_tokens), vocabulary)
        check_adapter(engine_request, self.adapters is not None)
        row_gains = self.row_controllers.row_gains(engine_request.control)
        detokenizer, eos = self.new_detokenizer(), self.model.stop_tokens
        transcript = Transcript(request, detokenizer, len(prompt), eos, keep=False)
        output_stream = QueuedOutputStream(engine_request, self.notify)
        rules = token_rules(engine_request, self.tokenizer, vocabulary)
        sequence = Sequence(engine_request, output_stream, prompt, transcript, row_gains, rules)
        sequence.stop_tokens, sequence.context_key = stop_tokens, self.model.decoder.context_key
        sequence.private_pages = self.method is not None and self.method.alters(len(prompt) - 1)
        if self.adapters is not None:
            sequence.adapter = self.adapters.acquire(engine_request.adapter)
        sequence.page_hashes = self.page_hashes(prompt, engine_request.cache_salt, sequence.adapter)
        return sequence

    def page_hashes(
        self, prompt: Many[int], salt: str | None, adapter: LoadedAdapter = NO_ADAPTER
    ) -> list[PageHash]:
        """Hashes of the full pages of a prompt; none where it shares no page with others.

        Args:
            prompt: token ids.
            salt: only prompts with the same one share pages.
            adapter: under which it is read.
        """
        private = self.method is not None and self.method.alters(len(prompt) - 1)
        if private or not self.options.enable_prefix_caching:
            return []
        root = root_hash(self.model.decoder.context_key(len(prompt)), adapter.id, salt or "")
        return list(page_hashes(root, prompt, self.sizes.page_size))

    def release(self, sequence: Sequence) -> None:
        """Count the end of a sequence, which uses its adapter no more."""
        if self.adapters is not None:
            self.adapters.release(sequence.adapter)
            sequence.adapter = NO_ADAPTER
