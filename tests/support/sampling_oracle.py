"""What a row's distribution must be, in plain float64, one row at a time; and random rows to try."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from phalanx.workers.config import LogprobsMode
from phalanx.workers.messages import NewRequest
from phalanx.workers.sampler import Sampled, sample
from phalanx.workers.sampling_batch import SamplingBatch
from phalanx.workers.sampling_params import SamplingParams
from phalanx.workers.sampling_rows import GrammarWords, SamplingRows

Floats = npt.NDArray[np.float64]
NEVER = -np.inf


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row to sample: its logits, what its request holds, and what it asks for."""

    logits: npt.NDArray[np.float32]
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = ()
    grammar: frozenset[int] | None = None
    vocab_limit: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Expected:
    """raw: log-probabilities before processing; probabilities: what is drawn from; greedy: the likeliest token."""

    raw: Floats
    probabilities: Floats
    greedy: int


def softmax(z: Floats) -> Floats:
    e = np.exp(z - z.max())
    return e / e.sum()


def log_softmax(z: Floats) -> Floats:
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def masked(z: Floats, banned: list[int]) -> Floats:
    """`z` without some tokens, unless none would be left."""
    w = z.copy()
    w[banned] = NEVER
    return w if np.isfinite(w).any() else z


def expect(row: Row, *, slack: float = 0.0) -> Expected:
    """slack: how much the thresholds of min-p and top-p are moved, to see whether a row is near an edge."""
    p = row.params
    z = row.logits.astype(np.float64)
    size = z.size
    if row.vocab_limit is not None:
        z[row.vocab_limit :] = NEVER
    if row.grammar is not None:
        z = masked(z, [i for i in range(size) if i not in row.grammar])
    raw = log_softmax(z)
    if p.allowed_token_ids is not None:
        z = masked(z, [i for i in range(size) if i not in p.allowed_token_ids])
    ends = [
        word[-1]
        for word in p.bad_words_token_ids
        if len(word) == 1 or tuple(row.output[-len(word) + 1 :]) == word[:-1]
    ]
    z = masked(z, ends)
    for token_id, bias in p.logit_bias.items():
        z[token_id] += min(100.0, max(-100.0, bias))
    if len(row.output) < p.min_tokens:
        z = masked(z, list(row.stop_token_ids))
    for token_id in {*row.prompt, *row.output}:
        z[token_id] = (
            z[token_id] / p.repetition_penalty if z[token_id] > 0 else z[token_id] * p.repetition_penalty
        )
    for token_id in set(row.output):
        z[token_id] -= p.frequency_penalty * row.output.count(token_id) + p.presence_penalty
    greedy = int(np.argmax(z))
    if p.temperature == 0.0:
        return Expected(raw=raw, probabilities=np.eye(size)[greedy], greedy=greedy)
    z = z / np.float64(np.float32(p.temperature))
    if p.min_p > 0.0:
        z[z < z.max() + min(0.0, np.log(p.min_p) + slack) - 1e-12] = NEVER
    if 0 < p.top_k < size:
        z[z < np.sort(z)[-p.top_k]] = NEVER
    if p.top_p < 1.0:
        order = np.argsort(-z, kind="stable")
        mass = softmax(z[order])
        inside = np.cumsum(mass) - mass < p.top_p - 1e-6 + slack
        inside[0] = True
        z[z < z[order[inside]].min()] = NEVER
    return Expected(raw=raw, probabilities=softmax(z), greedy=greedy)


def hold(
    rows: list[Row],
    *,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    max_num_seqs: int | None = None,
    device: str = "cpu",
) -> SamplingRows:
    """Rows as a worker holds them, row i of the batch in row i."""
    held = SamplingRows(
        max_num_seqs=max_num_seqs or len(rows),
        vocab_size=rows[0].logits.size,
        device=torch.device(device),
        logprobs_mode=mode,
    )
    for number, row in enumerate(rows):
        held.add(number, new_request(row, str(number)))
    return held


def new_request(row: Row, request_id: str = "r") -> NewRequest:
    return NewRequest(
        request_id=request_id,
        token_ids=[*row.prompt, *row.output],
        num_prompt_tokens=len(row.prompt),
        num_computed_tokens=0,
        block_ids=[],
        sampling_params=row.params,
        seed=row.seed,
        stop_token_ids=row.stop_token_ids,
        vocab_limit=row.vocab_limit,
    )


def batch_of(held: SamplingRows, rows: list[Row]) -> SamplingBatch:
    constrained = [place for place, row in enumerate(rows) if row.grammar is not None]
    size = rows[0].logits.size
    bits = np.zeros((len(constrained), -(-size // 32) * 32), dtype=np.uint8)
    for at, place in enumerate(constrained):
        bits[at, sorted(rows[place].grammar or ())] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4").copy()
    return held.batch(
        np.arange(len(rows)),
        np.array([len(row.output) for row in rows]),
        GrammarWords(places=constrained, words=words),
    )


def logits_of(rows: list[Row]) -> torch.Tensor:
    return torch.from_numpy(np.stack([row.logits for row in rows]))


def run(rows: list[Row], *, mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS) -> Sampled:
    """Sample one token for each row."""
    return sample(logits_of(rows), batch_of(hold(rows, mode=mode), rows))


def dense(sampled: Sampled, row: int, size: int) -> Floats:
    """The numbers of the whole vocabulary that a row with logprobs=-1 has got."""
    (table,) = sampled.logprobs
    found = np.full(size, np.nan)
    found[table.token_ids[row, 1:].numpy()] = table.values[row, 1:].numpy()
    return found


def random_row(generator: np.random.Generator, size: int, **changes: object) -> Row:
    """A row with anything on; about half of its features."""

    def maybe(value: object, off: object) -> object:
        return value if generator.random() < 0.5 else off

    def ids(low: int, high: int) -> list[int]:
        return generator.integers(0, size, generator.integers(low, high)).tolist()

    logits = generator.normal(size=size) * generator.choice([0.2, 2.0, 8.0])
    if generator.random() < 0.3:
        logits = logits.round(1)
    output = ids(0, 12)
    words = [tuple(ids(1, 4)) for _ in range(3)]
    if len(output) > 2:
        words.append((*output[-2:], int(generator.integers(size))))
    fields: dict[str, object] = {
        "temperature": float(generator.choice([0.0, 0.01, 0.7, 1.0, 1.6])),
        "top_p": maybe(float(generator.choice([0.05, 0.5, 0.9, 0.99])), 1.0),
        "top_k": maybe(int(generator.choice([1, 3, 20, size - 1, size, 10**6])), 0),
        "min_p": maybe(float(generator.choice([0.01, 0.1, 0.5, 1.0])), 0.0),
        "repetition_penalty": maybe(float(generator.choice([0.5, 1.2, 3.0])), 1.0),
        "frequency_penalty": maybe(float(generator.uniform(-2, 2)), 0.0),
        "presence_penalty": maybe(float(generator.uniform(-2, 2)), 0.0),
        "logit_bias": maybe(
            dict(zip(ids(3, 4), generator.choice([-1e9, -3.0, 0.5, 4.0, 1e9], 3).tolist(), strict=True)), {}
        ),
        "allowed_token_ids": maybe(tuple(ids(1, size // 2)), None),
        "bad_words_token_ids": maybe(tuple(words), ()),
        "min_tokens": int(maybe(int(generator.integers(0, 14)), 0)),  # type: ignore[call-overload]
        "max_tokens": None,
        **changes,
    }
    return Row(
        logits=logits.astype(np.float32),
        params=SamplingParams(**fields),  # type: ignore[arg-type]
        prompt=ids(1, 9),
        output=output,
        stop_token_ids=tuple(ids(1, 4)),
        grammar=maybe(frozenset(ids(1, size)), None),  # type: ignore[arg-type]
        vocab_limit=maybe(size - 3, None),  # type: ignore[arg-type]
        seed=int(generator.integers(-(2**63), 2**63 - 1)),
    )
