"""The oracle's generation for one input, step by step: forward pass, logits processing, sampling, text, stop reason.

A second implementation of TGIS's rules; of tgis only the protobuf messages are used. Decisions are repeated with noise
added to the logits: a case that rounding could change is refused.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import regex
import torch
from golden_model import ForwardPasses, OracleModel, SoftPrompt
from transformers import (
    ExponentialDecayLengthPenalty,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from tgis.pb import generation_pb2 as pb

T = TypeVar("T", bound=Hashable)
REPLACEMENT = "\ufffd"
NOISE = 1e-4  # more than the order of a float32 summation changes a logit
TRIALS = 8
GAMMA, DELTA = 0.5, 2.0  # of a watermark
UNLIKELY = 1e-4  # what all other tokens together may have where a seed draws; the draws of a seed are always the same


_WS = r"(?: |\r?\n[ \t]{0,32})?"
EQUIVALENT_REGEXES = {  # of the grammars and schemas in the cases
    'root ::= word (", " word)* "."\nword ::= [a-z]+': r"[a-z]+(, [a-z]+)*\.",
    'start: "Alice " verb\nverb: "was" | "said" | /[a-z]{9}/': r"Alice (was|said|[a-z]{9})",
    '{"type": "object", "properties": {"said": {"type": "boolean"}, "n": {"type": "integer", "minimum": 10, '
    '"maximum": 29}}, "required": ["said", "n"], "additionalProperties": false}': (
        rf'\{{{_WS}"said"{_WS}:{_WS}(true|false){_WS},{_WS}"n"{_WS}:{_WS}[12][0-9]{_WS}\}}'
    ),
}


def constrained(decoding: pb.DecodingParameters) -> bool:
    case = decoding.WhichOneof("guided")
    return case is not None and not (case == "format" and decoding.format == pb.DecodingParameters.TEXT)


class AmbiguousError(Exception):
    """The answer depends on rounding or on a random draw."""


class OutputPenalty(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalty as OpenAI's documentation defines them."""

    def __init__(self, frequency: float, presence: float, begin: int) -> None:
        self.frequency, self.presence, self.begin = frequency, presence, begin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, output in zip(scores, input_ids[:, self.begin :].tolist(), strict=True):
            for token in set(output):
                row[token] -= output.count(token) * self.frequency + self.presence
        return scores


class Exclusions(LogitsProcessor):  # type: ignore[misc]
    """The tokens that a request excludes, one by one."""

    def __init__(self, model: OracleModel, params: pb.Parameters, begin: int, only_eos: bool) -> None:
        self.begin, self.only_eos = begin, only_eos
        self.allowed, self.stopping = list(params.decoding.allowed_token_ids), params.stopping
        texts = [space + word.lstrip() for word in params.decoding.bad_words for space in ("", " ")]
        self.words = [model.tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, output in zip(scores, input_ids[:, self.begin :].tolist(), strict=True):
            row[[token for token in range(len(row)) if self._excluded(token, output)]] = -torch.inf
        return scores

    def _excluded(self, token: int, output: list[int]) -> bool:
        if self.allowed and token not in self.allowed:
            return True
        early = len(output) < self.stopping.min_new_tokens and token in self.stopping.stop_token_ids
        bad = any([*output, token][-len(word) :] == word for word in self.words)
        return (early or bad) and not self.only_eos


class OutputText:
    """The output text, token by token, and the search for stop sequences in it."""

    def __init__(self, model: OracleModel, stops: list[str], include: bool) -> None:
        self.model, self.include = model, include
        self.stops = [stop.encode() for stop in stops]
        self.output = b""
        self.ids: list[int] = []
        self.pending: list[int] = []
        self.byte_level = type(model.tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
        self.placeholder = model.tokenizer("A", add_special_tokens=False).input_ids[:1]

    def add(self, token: int) -> int:
        """Append a token; returns the number of bytes of text that it completed."""
        self.ids.append(token)
        self.pending.append(token)
        text = self._decoded()
        if text.endswith(REPLACEMENT):
            return 0
        self.pending.clear()
        self.output += text.encode()
        return len(text.encode())

    def _decoded(self) -> str:
        if self.byte_level:
            return self.model.decode(self.pending)
        if self.model.encoder_decoder:
            return self.model.decode(self.ids)[len(self.output.decode()) :]
        before = self.model.decode(self.placeholder)
        text = self.model.decode(self.placeholder + self.pending)
        assert text.startswith(before)
        return text[len(before) :]

    def stop(self, added: int) -> str:
        """The stop sequence that the latest bytes complete, or ""; truncates the output there."""
        for stop in self.stops if added else ():
            start = self.output.rfind(stop, max(0, len(self.output) + 1 - added - len(stop)))
            if start >= 0:
                self.output = self.output[: start + len(stop) if self.include else start]
                return stop.decode()
        return ""

    def whole(self) -> str:
        return self.output.decode() + self.model.decode(self.pending).rstrip(REPLACEMENT)

    def continuations(self, vocab_size: int) -> list[str]:
        """The text with each token of the vocabulary behind it."""
        if self.model.encoder_decoder:
            head, before, ids = "", "", self.ids
        elif self.byte_level:
            head, before, ids = self.output.decode(), "", self.pending
        else:
            before = self.model.decode(self.placeholder)
            head, ids = self.output.decode(), self.placeholder + self.pending
        texts = self.model.tokenizer.backend_tokenizer.decode_batch([[*ids, token] for token in range(vocab_size)])
        return [head + text.removeprefix(before) for text in texts]


class NaiveMask:
    """Removes what a grammar does not allow: tries every token of the vocabulary with a regex that says the same."""

    def __init__(self, model: OracleModel, decoding: pb.DecodingParameters) -> None:
        self.model = model
        match decoding.WhichOneof("guided"):
            case "choice":
                pattern = "|".join(map(regex.escape, decoding.choice.choices))
            case "regex":
                pattern = decoding.regex
            case case:
                pattern = EQUIVALENT_REGEXES[getattr(decoding, str(case))]
        self.pattern = regex.compile(pattern)

    def allowed(self, output: OutputText, vocab_size: int) -> torch.Tensor:
        """bool [V]"""
        text = output.output.decode() + self.model.decode(output.pending)
        # A token that adds no text is never allowed, as the first space of an encoder-decoder's output.
        allowed = torch.tensor([more != text and self._allows(more) for more in output.continuations(vocab_size)])
        allowed[[token for token in range(vocab_size) if not self.model.token_strings([token])[0]]] = False
        allowed[self.model.tokenizer.all_special_ids] = False
        allowed[self.model.eos_ids] = self.pattern.fullmatch(text) is not None
        return allowed

    def _allows(self, text: str) -> bool:
        return REPLACEMENT not in text and self.pattern.fullmatch(text, partial=True) is not None


class OracleRun:
    """One input."""

    def __init__(self, model: OracleModel, text: str, params: pb.Parameters, prompt: str) -> None:
        self.model, self.params = model, params
        self.prompt = model.prompts[prompt] if prompt else SoftPrompt()
        self.ids = model.truncate(model.encode(text), params.truncate_input_tokens)
        self.inputs = len(self.ids)
        self.response = pb.GenerationResponse(input_token_count=self.inputs)
        neutral = params.sampling.temperature or not params.sampling.HasField("temperature")
        self.samples = params.method == pb.SAMPLE and bool(neutral)
        if self.samples:
            if not params.sampling.HasField("seed"):
                raise AmbiguousError("the seed is drawn")
            self.response.seed = params.sampling.seed
        with torch.inference_mode():
            self.decoding = ForwardPasses(model, self.ids, self.prompt)
            self.context = list(self.decoding.start_ids)
            self.mask = NaiveMask(model, params.decoding) if constrained(params.decoding) else None
            self._run(text)

    def _run(self, text: str) -> None:
        stopping, options = self.params.stopping, self.params.response
        include = (
            stopping.include_stop_sequence
            if stopping.HasField("include_stop_sequence")
            else self.model.include_stop_sequence
        )
        output = OutputText(self.model, list(stopping.stop_sequences), include)
        logits = self.decoding.logits(self.decoding.soft_prompt + self.context)  # [T, V]
        self.vocab_size = logits.shape[-1]
        if options.input_tokens:
            self.response.input_tokens.extend(self._input_infos(logits[-1:] if self.model.encoder_decoder else logits))
        while not self.response.stop_reason:
            allowed = self.mask.allowed(output, logits.shape[-1]) if self.mask else None
            token, info = self._choose(logits[-1], allowed)
            self.context.append(token)
            self.response.generated_token_count += 1
            if options.generated_tokens:
                self.response.tokens.append(info)
            hidden = token in stopping.stop_token_ids and not include
            self._end(token, output, 0 if hidden else output.add(token))
            if not self.response.stop_reason:
                logits = self.decoding.logits([token])
        stopped = self.response.stop_reason == pb.STOP_SEQUENCE
        generated = output.output.decode() if stopped else output.whole()
        echo = text + "\n\n" * self.model.encoder_decoder if options.input_text else ""
        self.response.text = echo + generated

    def _end(self, token: int, output: OutputText, added: int) -> None:
        stopping = self.params.stopping
        start = self.model.encoder_decoder and bool(self.prompt.decoder)  # TGIS counts it with the decoder's prompt
        virtual = len(self.prompt.encoder) + len(self.prompt.decoder) + start
        asked, room = stopping.max_new_tokens or 20, self.model.sequence_length - virtual - self.inputs
        count = self.response.generated_token_count
        if count < stopping.min_new_tokens and not (self.mask and token in self.model.eos_ids):
            return
        if (token in self.model.eos_ids and not stopping.ignore_eos) or token in stopping.stop_token_ids:
            self.response.stop_reason = pb.EOS_TOKEN
        elif count >= min(asked, room):
            self.response.stop_reason = pb.TOKEN_LIMIT if asked > room else pb.MAX_TOKENS
        elif stop := output.stop(added):
            self.response.stop_reason = pb.STOP_SEQUENCE
            self.response.stop_sequence = stop

    def _choose(self, logits: torch.Tensor, allowed: torch.Tensor | None) -> tuple[int, pb.TokenInfo]:
        """The next token. logits: [V]"""

        def scores(logits: torch.Tensor) -> torch.Tensor:
            processed: torch.Tensor = self._processors(allowed)(torch.tensor([self.context]), logits[None].clone())
            return processed[0]

        def choice(logits: torch.Tensor) -> int:
            processed = scores(logits)
            if self.samples and processed.softmax(-1).max() < 1 - UNLIKELY:
                raise AmbiguousError("a draw decides")
            return int(processed.argmax())

        token = stable_under_noise(choice, logits)
        return token, self._info(token, scores, logits)

    def _processors(self, allowed: torch.Tensor | None) -> LogitsProcessorList:
        """The logits processors of the request, in TGIS's order."""
        params, eos, begin = self.params, self.model.eos_ids, len(self.decoding.start_ids)
        generated = self.response.generated_token_count
        penalty = params.decoding.length_penalty
        found: list[Any] = []
        if params.decoding.watermark:
            found.append(WatermarkLogitsProcessor(self.vocab_size, "cpu", GAMMA, DELTA))
        if biases := dict(params.decoding.logit_bias):
            found.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()}))
        only_eos = allowed is not None and not {*allowed.nonzero()[:, 0].tolist()} - {*eos}
        found.append(Exclusions(self.model, params, begin, only_eos))
        if generated < params.stopping.min_new_tokens and not only_eos:
            found.append(MinNewTokensLengthLogitsProcessor(begin, params.stopping.min_new_tokens, eos))
        elif params.decoding.HasField("length_penalty"):
            found.append(ExponentialDecayLengthPenalty((penalty.start_index, penalty.decay_factor), eos, begin))
        if repetition := params.decoding.repetition_penalty:
            found.append(RepetitionPenaltyLogitsProcessor(repetition))
        found.append(OutputPenalty(params.decoding.frequency_penalty, params.decoding.presence_penalty, begin))
        if allowed is not None:
            found.append(lambda _, scores: scores.masked_fill(~allowed, -torch.inf))
        if self.samples:
            found += self._warpers(params.sampling)
        return LogitsProcessorList(found)

    def _warpers(self, sampling: pb.SamplingParameters) -> Iterator[Any]:
        if sampling.temperature:
            yield TemperatureLogitsWarper(sampling.temperature)
        if sampling.min_p:
            yield MinPLogitsWarper(sampling.min_p)
        if sampling.top_k:
            yield TopKLogitsWarper(sampling.top_k)
        if sampling.top_p:
            yield TopPLogitsWarper(sampling.top_p)
        if 0 < sampling.typical_p < 1:
            yield TypicalLogitsWarper(sampling.typical_p)

    def _input_infos(self, logits: torch.Tensor) -> Iterator[pb.TokenInfo]:
        """logits: [T, V]; an encoder's input has none."""
        shown = self.prompt.encoder if self.model.encoder_decoder else self.prompt.decoder
        tokens = [self.model.pad_id] * len(shown) + self.ids
        unpredicted = len(tokens) if self.model.encoder_decoder else 1
        for name in self.model.token_strings(tokens[:unpredicted]):
            yield pb.TokenInfo(text=name, logprob=float("nan") if self.params.response.token_logprobs else 0)
        for token, row in zip(tokens[unpredicted:], logits[:-1], strict=True):
            yield self._info(token, torch.clone, row)

    def _info(self, token: int, scores: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> pb.TokenInfo:
        """Logprob, rank and candidates of the token. logits: [V]"""
        options = self.params.response
        info = pb.TokenInfo(text=self.model.token_strings([token])[0])
        logprobs = scores(logits).log_softmax(-1)
        if options.token_logprobs:
            info.logprob = logprobs[token]
        if options.token_ranks:
            info.rank = stable_under_noise(lambda noisy: rank(scores(noisy), token), logits)
        if n := options.top_n_tokens:
            ids = stable_under_noise(lambda noisy: candidates(scores(noisy), n, options.token_logprobs), logits)
            for name, candidate in zip(self.model.token_strings(list(ids)), ids, strict=True):
                logprob = logprobs[candidate] if options.token_logprobs else 0.0
                info.top_tokens.add(text=name, logprob=logprob)
        return info


def rank(scores: torch.Tensor, token: int) -> int:
    """scores: [V]"""
    return 1 + int((scores > scores[token]).sum())


def candidates(scores: torch.Tensor, n: int, by_logprob: bool) -> tuple[int, ...]:
    """The ids of the n best, in the order of the response. scores: [V]"""
    threshold = max(scores.topk(min(n, len(scores))).values[-1].item(), torch.finfo(torch.float32).min)
    ids: list[int] = (scores >= threshold).nonzero()[: 4 * n, 0].tolist()
    if by_logprob:
        ids.sort(key=lambda token: -scores[token].item())
    return tuple(ids)


def stable_under_noise(judge: Callable[[torch.Tensor], T], logits: torch.Tensor) -> T:
    """The value of `judge`, which must not change when noise is added to the logits. logits: [V]"""
    draw = torch.Generator().manual_seed(0)
    noise = torch.rand((TRIALS, len(logits)), generator=draw, dtype=logits.dtype) * 2 - 1
    said = {judge(logits)} | {judge(logits + NOISE * row) for row in noise}
    if len(said) > 1:
        raise AmbiguousError(f"rounding decides: {said}")
    return said.pop()
