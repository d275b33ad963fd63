"""The faults that are sown into the kernels, each a single change of the source; `mutations` runs them."""

from .expert_mutants import EXPERT_MUTANTS
from .mutant import Mutant, Tests, sown

__all__ = ["MUTANTS", "Mutant", "Tests"]

PAGED, RUNTIME = "entropic_jax/pallas/paged_attention", "entropic_jax/cpu_runtime"
TOPK, MOMENTS = "entropic_jax/pallas/topk_entropy", "entropic_jax/pallas/entropy_moments"
DISPATCH = "entropic_jax/pallas/dispatch.py"


DECODE = Tests("tests/pallas/test_paged_attention.py", "(agree_with_float64 or order_100) and cpu")
REFERENCE = Tests("tests/pallas/test_paged_attention.py", "(agree_with_float64 or order_100) and xla")
SELECT = Tests("tests/pallas/test_paged_attention.py", "(choice_keeps or nothing_is_dropped) and cpu")
NARROW_READ = Tests("tests/pallas/test_narrow_pages.py", "what_is_read or what_is_no_number")
NARROW_WRITE = Tests("tests/pallas/test_narrow_pages.py", "what_is_written or nearest_number")
PREFILL = Tests("tests/pallas/test_paged_prefill.py", "")
TPU_DECODE = Tests("tests/pallas/test_paged_attention_kernels.py", "tpu_in_the_interpreter and late")
TPU_BLOCKS = Tests("tests/pallas/test_paged_attention_kernels.py", "several_quantised_pages")
MERGE = Tests("tests/pallas/test_paged_attention_kernels.py", "parts_merge")
TPU_PREFILL = Tests(
    "tests/pallas/test_paged_prefill_and_write_kernels.py",
    "(prefill_in_the_interpreter and not gpu and late) or several",
)
TPU_WRITE = Tests(
    "tests/pallas/test_paged_prefill_and_write_kernels.py", "test_write and late and (int8 or float32)"
)
TOPK_REFERENCE = Tests("tests/pallas/test_topk_entropy.py", "reference_is_exact")
MOMENTS_ON_CPU = Tests("tests/pallas/test_entropy_moments.py", "against_float64 or extremes or wherever")
PAGE = Tests("tests/cpu_runtime/test_attention.py", "against_float64 or largest_score")
POOL = Tests("tests/cpu_runtime/test_thread_pool.py", "")
THRESHOLD = Tests("tests/cpu_runtime/test_threshold.py", "")
CHOICE_OF_BACKEND = Tests("tests/pallas/test_dispatch.py", "")

MUTANTS = (
    *sown(
        f"{RUNTIME}/thread_pool.py",
        POOL,
        (
            "the caller does not wait for the helpers",
            "while _load_acquire(mailbox + DONE) < num_chunks:",
            "while _load_acquire(mailbox + DONE) < 0:",
        ),
        (
            "a chunk is done before it is run",
            "_call_task(function, argument, left - 1)\n            _fetch_add(mailbox + DONE, 1)\n",
            "_fetch_add(mailbox + DONE, 1)\n            _call_task(function, argument, left - 1)\n",
        ),
        (
            "two threads take the same chunk",
            "if _compare_and_swap(mailbox + JOB, job, job - 1) == 1:",
            "if _compare_and_swap(mailbox + JOB, job, job - 1) >= 0:",
        ),
        ("the pool is never released", "    _store_release(mailbox + BUSY, 0)\n", ""),
        ("two callers use the pool at once", " or _compare_and_swap(mailbox + BUSY, 0, 1) == 0:", ":"),
    ),
    *sown(
        f"{RUNTIME}/instructions.py",
        NARROW_READ,
        (
            "bfloat16 is widened by 15 bits",
            "builder.zext(bits, INTEGERS), integers(16)",
            "builder.zext(bits, INTEGERS), integers(15)",
        ),
    ),
    *sown(
        f"{RUNTIME}/vector.py",
        MOMENTS_ON_CPU,
        ("a coefficient of the exponentials", "0.24016445", "0.24116445"),
    ),
    *sown(
        f"{RUNTIME}/instructions.py",
        PAGE,
        ("a coefficient of 2ᶠ", "0.240222424", "0.241222424"),
        (
            "lanes of a key are not all summed",
            "(2, 3, other + 2, other + 3)",
            "(2, 2, other + 2, other + 2)",
        ),
    ),
    *sown(
        f"{RUNTIME}/attention.py",
        PAGE,
        (
            "the old maximum counts as 0",
            "drop = builder.fsub(load(builder, top, 0, FLOAT), peak)",
            "drop = builder.fneg(peak)",
        ),
        (
            "sums are not rescaled",
            "builder.fmul(load(builder, out, j * LANES), shrink)",
            "load(builder, out, j * LANES)",
        ),
        (
            "the last scores of a page, not the largest",
            "return [larger(builder, value, carried[0])]",
            "return [value]",
        ),
    ),
    *sown(
        f"{RUNTIME}/attention.py",
        NARROW_READ,
        (
            "scores are divided by the scales",
            "return builder.fmul(value, load(builder, scale, t))",
            "return builder.fdiv(value, load(builder, scale, t))",
        ),
        (
            "weights are multiplied by the scales of keys",
            "scaled_by(weight, value_scale, t)",
            "scaled_by(weight, key_scale, t)",
        ),
    ),
    *sown(
        f"{RUNTIME}/threshold.py",
        THRESHOLD,
        ("the number of pages to keep is ignored", " and count_above + count[digit] >= number", ""),
        ("the mass above is not carried", "                mass_above += mass[digit]\n", ""),
    ),
    *sown(
        f"{PAGED}/cpu.py",
        DECODE,
        ("the next page is not looked up", "if entry + 1 < end:", "if entry + 1 < begin:"),
        (
            "pieces are merged without their maximum",
            "peak = max(peak, top[p, ",
            "peak = min(np.float32(0) * peak, top[p, ",
        ),
    ),
    *sown(
        f"{PAGED}/cpu.py",
        NARROW_READ,
        ("NaN counts as no mass", "if mass != 0:", "if mass > 0:"),
    ),
    *sown(
        f"{PAGED}/cpu_select_pages.py",
        SELECT,
        (
            "pages that are always kept do not count",
            "need = np.float32(1) - limit - mass_always_kept",
            "need = np.float32(1) - limit",
        ),
        (
            "the last page counts as full",
            "mean_weight * score[g, pages - 1] / last_filled",
            "mean_weight * score[g, pages - 1] * inverse_size",
        ),
        (
            "information is ignored",
            "weight[b] = information[page_table[b], head]",
            "weight[b] = np.float32(1)",
        ),
        ("one recent page too few", "b >= pages - recent_pages", "b > pages - recent_pages"),
        ("pages are dropped at a limit of 0", "if not dropped_mass_limit > 0 or pages", "if pages"),
        (
            "the bound of what is left out lacks its sum",
            "log_bound[g] = peak + np.log(total)",
            "log_bound[g] = peak",
        ),
    ),
    *sown(
        f"{PAGED}/cpu_write.py",
        NARROW_WRITE,
        ("ties of bfloat16 round up", "+ np.uint32(0x7FFF) + odd", "+ np.uint32(0x8000)"),
        (
            "the norm of a page is that of its last value",
            "value_norm if s == 0 else max(norm[p, head], value_norm)",
            "value_norm",
        ),
        (
            "a vector of zeros has the scale 0",
            "extent * inverse if extent != 0 else np.float32(1)",
            "extent * inverse",
        ),
        (
            "summaries survive the first slot of a page",
            "                if s == 0:\n",
            "                if s == -1:\n",
        ),
    ),
    *sown(
        f"{PAGED}/reference.py",
        REFERENCE,
        (
            "the reference sees one position too many",
            "                & (position < context_length)\n",
            "                & (position <= context_length)\n",
        ),
        (
            "the reference does not rescale its sum",
            "return new, total * scale + weight.sum(-1), out * scale[..., None] + part",
            "return new, total * scale + weight.sum(-1), out + part",
        ),
    ),
    *sown(
        f"{PAGED}/prefill_reference.py",
        PREFILL,
        (
            "dense prefill sees past the context",
            "            position = jnp.where(position < context_length, position, FAR)\n",
            "",
        ),
        (
            "listed prefill ignores the window",
            "& (position >= first_seen), score, NEGATIVE)\n            new = jnp.maximum(top, score.max(0",
            ", score, NEGATIVE)\n            new = jnp.maximum(top, score.max(0",
        ),
        (
            "dense prefill ignores the window, and a query does not see itself",
            "(position >= first_seen), score, NEGATIVE)\n            new = jnp.maximum(top, score.max(1",
            "(position < own_position), score, NEGATIVE)\n            new = jnp.maximum(top, score.max(1",
        ),
    ),
    *sown(
        f"{PAGED}/split_kv.py",
        MERGE,
        (
            "partial results are merged without their maximum",
            "top = jnp.maximum(log_sum_exp.max(-2, keepdims=True), NEGATIVE)",
            "top = jnp.zeros_like(log_sum_exp.max(-2, keepdims=True))",
        ),
        (
            "parts that were not written are merged",
            "    out = jnp.where(written[..., None, None], out, 0.0)\n",
            "",
        ),
    ),
    *sown(
        f"{PAGED}/tpu_softmax.py",
        TPU_DECODE._replace(expression="tpu_in_the_interpreter and late and bfloat16"),
        (
            "sums are kept in bfloat16",
            "sum_of[head] = sum_of[head] * shrink[:, :1] + part",
            "sum_of[head] = (sum_of[head] * shrink[:, :1] + part).astype(jnp.bfloat16).astype(jnp.float32)",
        ),
    ),
    *sown(
        f"{PAGED}/tpu.py",
        TPU_DECODE._replace(expression="(taken_together and late) or out_of_range"),
        ("copies of pages are not waited for", "(num_pages >> power) % 2 == 1", "num_pages >> power == 1"),
        ("a round copies one page several times", "start(i * UNROLLED + j)", "start(i * UNROLLED)"),
        ("a page out of range is copied", "jnp.clip(lists.pages, 0, keys.shape[0] - 1)", "lists.pages"),
    ),
    *sown(
        f"{PAGED}/tpu_softmax.py",
        TPU_DECODE._replace(expression="taken_together and late"),
        ("the first blocks are taken again", "attend(i * together, together)", "attend(0, together)"),
        ("the last blocks are left out", "rounds * together, stop", "rounds * together + 1, stop"),
    ),
    *sown(
        f"{PAGED}/tpu_softmax.py",
        TPU_DECODE._replace(expression="tpu_in_the_interpreter and late and cap"),
        (
            "the soft cap is not applied in decode",
            "score = shape.soft_cap * jnp.tanh(score / shape.soft_cap)",
            "score = score / 1.0",
        ),
    ),
    *sown(
        f"{PAGED}/tpu_tile.py",
        TPU_BLOCKS,
        (
            "all pages of a block have the scales of its first",
            "pool.scale[start + i, head]",
            "pool.scale[start, head]",
        ),
    ),
    *sown(
        f"{PAGED}/prefill_tpu.py",
        TPU_WRITE._replace(expression="prefill_in_the_interpreter and late and cap"),
        (
            "the soft cap is not applied in prefill",
            "score = shape.soft_cap * jnp.tanh(score / shape.soft_cap)",
            "score = score / 1.0",
        ),
    ),
    *sown(
        f"{PAGED}/prefill_tpu.py",
        TPU_WRITE._replace(expression="several_calls"),
        (
            "every call of prefill computes the first rows",
            "batch = slice(start, start + rows_per_call)",
            "batch = slice(0, rows_per_call)",
        ),
    ),
    *sown(
        f"{PAGED}/prefill_tpu.py",
        TPU_WRITE._replace(expression="prefill and several_quantised"),
        (
            "every block of prefill has the scales of the first",
            "start=step * shape.block, pages",
            "start=0, pages",
        ),
    ),
    *sown(
        f"{PAGED}/write_tpu.py",
        TPU_WRITE._replace(expression="quantised_pages and int8 and late"),
        (
            "the scale of a slot past 31 is put elsewhere",
            "at = jax.lax.rem(slot[start + i], sublanes), slot[start + i]",
            "at = (jax.lax.rem(slot[start + i], sublanes),) * 2",
        ),
    ),
    *sown(
        f"{PAGED}/write_tpu.py",
        TPU_WRITE._replace(expression="write_in_the_interpreter and late and float32"),
        (
            "a page that begins keeps its last owner's summaries",
            "begins_page = slot[start + i] == 0",
            "begins_page = slot[start + i] < 0",
        ),
    ),
    *sown(
        f"{TOPK}/reference.py",
        TOPK_REFERENCE,
        (
            "the k-th token belongs to the tail",
            "(logits == last) & (index <= place)",
            "(logits == last) & (index < place)",
        ),
        ("varentropy is not centred", "jnp.maximum(square - mean * mean, 0.0)", "jnp.maximum(square, 0.0)"),
        (
            "moments at temperature 0 are not 0",
            "keep = (temperature > 0) | jnp.isnan",
            "keep = (temperature >= 0) | jnp.isnan",
        ),
        (
            "places without a token have a valid index",
            "jnp.where(real, indices, logits.shape[-1])",
            "jnp.where(real, indices, 0)",
        ),
        (
            "the entropy of the head is that of all tokens",
            "entropy = _moments(values, inverse_temperature).entropy",
            "entropy = _moments(logits, inverse_temperature).entropy",
        ),
    ),
    *sown(
        f"{MOMENTS}/cpu.py",
        MOMENTS_ON_CPU,
        (
            "only the first piece is summed",
            "range(0, vectors, PIECE)",
            "range(0, min(vectors, PIECE), PIECE)",
        ),
        (
            "logits behind the last full vector are not summed",
            "[vectors + t] if vectors + t < vocabulary else -infinity",
            "[vectors + t] if vectors == 0 else -infinity",
        ),
        ("NaN in a row is not seen", "top = nan if scratch[1] > 0 else scratch[0]", "top = scratch[0]"),
        (
            "a temperature of NaN is not seen",
            "if not abs(top) < infinity or inverse != inverse:",
            "if not abs(top) < infinity:",
        ),
    ),
    *sown(
        DISPATCH,
        CHOICE_OF_BACKEND,
        (
            "any error counts as a refusal",
            "            except NotImplementedError as reason:\n                declined",
            "            except Exception as reason:\n                declined",
        ),
        (
            "the environment comes before the argument",
            "requested = backend or os.environ.get(VARIABLE) or None",
            "requested = os.environ.get(VARIABLE) or backend or None",
        ),
        (
            "the interpreter serves without being named",
            "[name for name in self.backends if name not in ONLY_BY_NAME]",
            "list(self.backends)",
        ),
    ),
    *EXPERT_MUTANTS,
)
