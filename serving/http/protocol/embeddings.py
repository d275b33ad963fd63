"""`/v1/embeddings`, `/score`, `/rerank`: bodies and responses, in the forms of OpenAI, vLLM and Jina."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ...engine.interface import Pooling
from ..settings import MOST_TEXTS
from .completion import Texts, TokenLists, Tokens
from .fields import Answer, Body, IntegralFloat, Items, Positive, conflict, unicode

Scoring = Literal["logprob", "embedding"]


class PooledBody(Body):
    """The fields that every request of these paths has."""

    _unicode = model_validator(mode="before")(unicode)

    model: str | None = Field(None, description="a model that /v1/models lists")
    pooling: Pooling = Field(
        "mean", description="of the hidden states: over the tokens of a text, or of the last token"
    )
    truncate_prompt_tokens: Positive | None = Field(
        None, description="keep only this many tokens at the end of each text"
    )
    user: str | None = None


class EmbeddingsBody(PooledBody):
    """A request for embeddings of texts, or of token ids."""

    input: str | Tokens | Texts | TokenLists
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is of float32 in little-endian order; float unless stated"
    )
    dimensions: Annotated[int, Field(ge=1), IntegralFloat] | None = Field(
        None, description="keep only the first components, and normalise those"
    )
    normalize: bool | None = Field(None, description="scale each embedding to length 1; true unless stated")
    add_special_tokens: bool | None = Field(None, description="what the model expects around a text (BOS)")
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["little", "native"] | None = None
    messages: None = Field(None, description="no conversations; render them with /tokenize")

    def texts(self) -> list[str | list[int]]:
        """Every text by itself."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else list(self.input)  # type: ignore[list-item]


class ScoringBody(PooledBody):
    """The fields of requests that compare texts."""

    scoring: Scoring = Field(
        "logprob",
        description="logprob: the geometric mean of the probabilities of the tokens of text_1 (the query) "
        "after text_2 (the document); embedding: the cosine of the embeddings",
    )
    separator: str = Field("\n\n", description="with logprob: between the document and the query")


class ScoreBody(ScoringBody):
    """A request for scores of pairs of texts: one to one, one to many, or pairwise."""

    text_1: str | Texts
    text_2: str | Texts

    @model_validator(mode="after")
    def _agree(self) -> Self:
        first, second = self.sides()
        if len(first) not in (1, len(second)):
            message = f"text_1 must have 1 text, or as many as text_2 ({len(second)}); got {len(first)}"
            raise conflict("text_1", message)
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        """The texts of both fields."""
        first, second = self.text_1, self.text_2
        return [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second


class Document(Body):
    """A document as an object."""

    text: str


class RerankBody(ScoringBody):
    """A request to order documents by their relevance for a query."""

    query: str
    documents: Annotated[Items[str | Document], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=0), IntegralFloat] | None = Field(
        None, description="return only the best; 0 is all"
    )
    return_documents: bool | None = Field(None, description="repeat each document; true unless stated")

    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class PromptUsage(Answer):
    """Numbers of tokens read."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """An embedding: numbers, or their bytes as base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Answer):
    """The embeddings in the order of the texts."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PromptUsage


class Score(Answer):
    """The score of a pair of texts: in (0, 1] by log-probabilities, in [-1, 1] by embeddings."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(Answer):
    """The scores in the order of the pairs."""

    object: Literal["list"]
    model: str
    data: list[Score]
    usage: PromptUsage


class RankedDocument(Answer):
    """A document, by its index in the request, with its score."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Answer):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage
