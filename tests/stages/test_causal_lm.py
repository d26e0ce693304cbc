"""The language model stage: on a tiny random model that each test run makes and reloads, and on the real SmolLM2."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.ar.causal_lm import CausalLM
from streamrt import BadRequest, Chunk, ConfigError, Context, Request, TooLong, text_chunk

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the extra streamrt[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra streamrt[torch]")

TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"], "additionalProperties": False}}},
]  # fmt: skip
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Any:
    """Byte-level BPE that knows a few words; every other character is one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["hello world user assistant system the quick brown fox"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 0.1 M parameters with a tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    tokenizer = tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def loaded(folder: Path, resolve: Callable[[str], Any] = Path, **args: Any) -> Iterator[CausalLM]:
    with ThreadPoolExecutor(1) as compute:
        context = Context(stage="llm", threads=1, resolve=resolve, compute=compute)
        stage = CausalLM(msgspec.convert({"model": str(folder), **args}, CausalLM.Args), context)
        compute.submit(stage.load).result()
        try:
            yield stage
        finally:
            stage.close()


@pytest.fixture(scope="module")
def stage(tiny: Path) -> Iterator[CausalLM]:
    with loaded(tiny, max_tokens=40, max_batch_tokens=8, max_sequences=8, kv_cache_mb=2) as stage:
        yield stage


async def nothing() -> AsyncIterator[Chunk]:
    return
    yield


async def run(
    stage: CausalLM, text: str | list[dict[str, Any]] = "hello world", *, name: str = "r", **params: Any
) -> tuple[str, dict[str, Any]]:
    """The reply to one user message, or to messages, and the final metadata."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    chunks = [c async for c in stage.process(Request(name, "respond", {"messages": messages, **params}), nothing())]
    assert [c.is_last for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(c.text for c in chunks[:-1])
    return "".join(c.text for c in chunks), chunks[-1].meta


def generated(folder: Path, messages: list[dict[str, Any]], **options: Any) -> tuple[str, int]:
    """What transformers' own `generate` says, and in how many tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[0, ids.shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True).replace("\ufffd", ""), len(out)


TEXTS = ["hello world", "the quick brown fox, again and again: " * 3, "größer 😀", "x"]


@pytest.mark.parametrize("text", TEXTS)
async def test_greedy_text_equals_that_of_generate(stage: CausalLM, tiny: Path, text: str) -> None:
    messages = [{"role": "system", "content": "hello"}, {"role": "user", "content": text}]
    expected, count = generated(tiny, messages, max_new_tokens=40)
    said, meta = await run(stage, messages)
    assert said == expected
    assert meta["usage"]["completion_tokens"] == count


async def test_repetition_penalty_equals_that_of_generate(stage: CausalLM, tiny: Path) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    expected, _ = generated(tiny, messages, max_new_tokens=40, repetition_penalty=1.5)
    assert (await run(stage, messages, repetition_penalty=1.5))[0] == expected


async def test_requests_side_by_side_say_what_they_say_alone(stage: CausalLM) -> None:
    alone = [await run(stage, text, seed=n, temperature=1.0) for n, text in enumerate(TEXTS)]
    together = await asyncio.gather(*(run(stage, text, name=str(n), seed=n, temperature=1.0) for n, text in enumerate(TEXTS)))
    assert [text for text, _ in together] == [text for text, _ in alone]


async def test_a_seed_repeats_and_another_one_differs(stage: CausalLM) -> None:
    first, again, other = [(await run(stage, temperature=1.5, seed=seed))[0] for seed in (1, 1, 2)]
    assert first == again != other


async def test_fed_text_is_the_user_message(stage: CausalLM) -> None:
    async def words() -> AsyncIterator[Chunk]:
        yield text_chunk("hello ")
        yield text_chunk("world")

    chunks = [c async for c in stage.process(Request("r", "respond"), words())]
    assert "".join(c.text for c in chunks) == (await run(stage, "hello world"))[0]


async def test_max_tokens_ends_with_length(stage: CausalLM) -> None:
    _, meta = await run(stage, max_tokens=3)
    assert meta["finish_reason"] == "length"
    assert meta["usage"]["completion_tokens"] == 3


async def test_a_stop_string_ends_the_text_before_it(stage: CausalLM) -> None:
    whole, _ = await run(stage)
    stop = whole[5:8]
    text, meta = await run(stage, stop=[stop, "never said"])
    assert text == whole[: whole.index(stop)]
    assert meta["finish_reason"] == "stop"


async def test_a_conversation_that_goes_on_reuses_what_was_computed_and_says_the_same(stage: CausalLM, tiny: Path) -> None:
    turns = [{"role": "user", "content": "the quick brown fox"}]
    reply, _ = await run(stage, turns)
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "hello"}]
    hit, meta = await run(stage, turns)
    assert meta["usage"]["cached_tokens"] > 10
    with loaded(tiny, max_tokens=40, prefix_cache=False) as cold:
        miss, cold_meta = await run(cold, turns)
    assert cold_meta["usage"]["cached_tokens"] == 0
    assert hit == miss == generated(tiny, turns, max_new_tokens=40)[0]


async def test_instructions_are_computed_at_load(tiny: Path) -> None:
    with loaded(tiny, max_tokens=4, instructions="the quick brown fox " * 4) as stage:
        _, meta = await run(stage, "x")
        assert meta["usage"]["cached_tokens"] > 16
        _, meta = await run(stage, [{"role": "system", "content": "world"}, {"role": "user", "content": "x"}])
        assert meta["usage"]["cached_tokens"] < 16


async def test_the_oldest_turns_go_when_the_conversation_is_too_long(tiny: Path) -> None:
    with loaded(tiny, max_tokens=8, max_context=128) as stage:
        roles = ["user", "assistant"] * 10 + ["user"]
        turns = [{"role": role, "content": f"hello world {n}"} for n, role in enumerate(roles)]
        system = {"role": "system", "content": "hello"}
        text, meta = await run(stage, [system, *turns])
        dropped = meta["truncated_messages"]
        assert dropped % 2 == 0, "what is left begins with a user's message"
        assert text == (await run(stage, [system, *turns[dropped:]]))[0]
        with pytest.raises(TooLong):
            await run(stage, turns, truncation="disabled")
        with pytest.raises(TooLong):
            await run(stage, "word " * 200)
        with pytest.raises(TooLong):
            await run(stage, "x" * 1_000_000)
        assert (await run(stage, "x"))[1]["finish_reason"]


async def test_a_reply_ends_where_the_context_does(tiny: Path) -> None:
    with loaded(tiny, max_tokens=200, max_context=64) as stage:
        _, meta = await run(stage, "hello world hello")
        assert meta["usage"]["prompt_tokens"] + meta["usage"]["completion_tokens"] <= 64


async def test_cancel_in_prefill_and_in_decode_leaves_nothing(stage: CausalLM) -> None:
    async def start(text: str, name: str, after: int) -> None:
        request = Request(name, "respond", {"messages": [{"role": "user", "content": text}]})
        replies = stage.process(request, nothing())
        for _ in range(after):
            await anext(replies)
        if after == 0:
            waiting = asyncio.ensure_future(anext(replies))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await replies.aclose()

    await asyncio.gather(*(start("hello world " * 20, str(n), n % 3) for n in range(20)))
    for _ in range(2):  # the turn that may run now, and the one that applies the last cancel
        await stage.compute(lambda: None)
    assert stage.state()["running"] == 0
    assert (await run(stage))[0]


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"temperature": 9}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"), ({"n": 99}, "n"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "system", "content": "only"}]}, "messages"), ({"stop": ["x"] * 99}, "stop"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": {"hello": 1}}, "logit_bias"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"messages": None, "prompt": [5, 99999]}, "prompt"), ({"prompt": "both"}, "prompt"), ({"messages": None, "prompt": ""}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"echo": True}, "echo"),
        ({"messages": None, "prompt": "hello", "echo": True, "logprobs": True}, "echo"), ({"suffix": "end"}, "suffix"), ({"best_of": 2}, "best_of"),
        ({"presence_penalty": 2.5}, "presence_penalty"), ({"frequency_penalty": "much"}, "frequency_penalty"), ({"min_p": 2}, "min_p"),
        ({"response_format": {"type": "xml"}}, "response_format"), ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "response_format"),
        ({"regex": "a("}, "regex"), ({"regex": "a", "grammar": "b"}, "grammar"), ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "function"}]}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "regex": "a"}, "tools"),
    ],
)  # fmt: skip
async def test_a_bad_parameter_is_named_and_costs_nothing(stage: CausalLM, params: dict[str, Any], word: str) -> None:
    params = {"messages": [{"role": "user", "content": "hello"}], **params}
    with pytest.raises(BadRequest, match=word) as error:
        async for _ in stage.process(Request("r", "respond", params), nothing()):
            pass
    assert error.value.param.startswith(word)


async def test_a_request_without_any_text_is_refused(stage: CausalLM) -> None:
    with pytest.raises(BadRequest, match="none to respond"):
        async for _ in stage.process(Request("r", "respond"), nothing()):
            pass


async def test_neutral_values_of_what_is_not_supported_are_accepted(stage: CausalLM) -> None:
    assert await run(stage, n=1, frequency_penalty=0.0, logprobs=False, logit_bias=None) == await run(stage)


async def chunks_of(stage: CausalLM, name: str = "r", **params: Any) -> list[Chunk]:
    params = {"messages": [{"role": "user", "content": "hello world"}], **params}
    return [chunk async for chunk in stage.process(Request(name, "respond", params), nothing())]


async def test_a_prompt_goes_to_the_model_as_it_is(stage: CausalLM, tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    ids = tokenizer("the quick brown", return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    expected = tokenizer.decode(out, skip_special_tokens=True).replace("\ufffd", "")
    for prompt in ("the quick brown", ids[0].tolist()):
        chunks = await chunks_of(stage, messages=None, prompt=prompt, max_tokens=12)
        assert "".join(chunk.text for chunk in chunks) == expected
        assert chunks[-1].meta["usage"]["prompt_tokens"] == ids.shape[1]


async def test_a_prompt_is_said_first_when_it_is_asked_for(stage: CausalLM, tiny: Path) -> None:
    """As it was given, once for each choice, and whatever the reply is held to; it does not count and nothing stops in it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    prompt = "the  quick brown <|im_start|>größe"

    async def said(**params: Any) -> tuple[list[str], dict[str, Any]]:
        chunks = await chunks_of(stage, messages=None, max_tokens=6, **params)
        texts = [""] * params.get("n", 1)
        for chunk in chunks:
            texts[chunk.meta.get("choice", 0)] += chunk.text
        return texts, chunks[-1].meta

    (plain,), meta = await said(prompt=prompt)
    (echoed,), again = await said(prompt=prompt, echo=True)
    assert echoed == prompt + plain
    assert [again["usage"][name] for name in ("prompt_tokens", "completion_tokens")] == [meta["usage"]["prompt_tokens"], 6]
    ids = tokenizer(prompt).input_ids
    assert (await said(prompt=ids, echo=True))[0] == [prompt + plain]
    assert (await said(prompt=prompt, echo=True, stop=["quick"]))[0] == [prompt + plain]
    texts, _ = await said(prompt=prompt, n=2, echo=True, temperature=1.0, seed=1)
    assert all(text.startswith(prompt) for text in texts)
    assert (await said(prompt=prompt, echo=True, regex="yes|no"))[0][0] in (f"{prompt}yes", f"{prompt}no")
    ends = (await chunks_of(stage, messages=None, prompt=prompt, max_tokens=1, logprobs=True))[0].meta["logprobs"][0]["id"]
    assert (await said(prompt=prompt, echo=True, stop_token_ids=[ends]))[0] == [prompt], "a reply that is empty"


async def test_log_probabilities_are_those_of_the_model(stage: CausalLM, tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    chunks = await chunks_of(stage, messages=None, prompt="hello", max_tokens=10, logprobs=True, top_logprobs=3, temperature=1.3, seed=4)
    told = [entry for chunk in chunks for entry in chunk.meta.get("logprobs", ())]
    assert len(told) == 10
    prompt = tokenizer("hello").input_ids
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt + [entry["id"] for entry in told]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    for entry, expected in zip(told, logprobs[:-1], strict=True):
        assert entry["logprob"] == pytest.approx(expected[entry["id"]].item(), abs=1e-4)
        assert [top["id"] for top in entry["top"]] == expected.topk(3).indices.tolist()
    said = bytes(byte for entry in told for byte in entry["bytes"]).decode(errors="ignore")
    assert "".join(chunk.text for chunk in chunks) == said


async def test_choices_are_those_of_their_seeds(stage: CausalLM) -> None:
    chunks = await chunks_of(stage, n=3, temperature=1.5, seed=7, max_tokens=12)
    texts = ["".join(chunk.text for chunk in chunks if chunk.meta.get("choice") == n) for n in range(3)]
    alone = [await run(stage, seed=7 + n, temperature=1.5, max_tokens=12) for n in range(3)]
    assert texts == [text for text, _ in alone]
    ends = [(chunk.meta["choice"], chunk.meta["finish_reason"]) for chunk in chunks[:-1] if "finish_reason" in chunk.meta]
    assert sorted(ends) == [(n, meta["finish_reason"]) for n, (_, meta) in enumerate(alone)]
    assert chunks[-1].meta["usage"]["completion_tokens"] == sum(meta["usage"]["completion_tokens"] for _, meta in alone)


async def test_a_bias_decides(stage: CausalLM, tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    token = tokenizer("world").input_ids[-1]
    for params in ({}, {"temperature": 1.0}):
        text, _ = await run(stage, max_tokens=3, logit_bias={str(token): 100}, **params)
        assert text == tokenizer.decode([token] * 3)


async def test_formats_and_calls_are_kept_beside_requests_that_have_none(tiny: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "shape", "schema": schema}}
    with loaded(tiny, max_tokens=400, max_batch_tokens=16, max_sequences=8, kv_cache_mb=4) as stage:
        assert set(stage.describe()["parameters"]) >= {"n", "response_format", "tools"}
        free = await run(stage, seed=3, temperature=1.0, max_tokens=30)
        *formed, calls, beside = await asyncio.gather(
            *(run(stage, name=f"f{n}", seed=n, temperature=float(n > 0), response_format=shape) for n in range(4)),
            chunks_of(stage, "c", seed=5, temperature=1.0, tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
            run(stage, name="free", seed=3, temperature=1.0, max_tokens=30),
        )
    assert beside[0] == free[0]
    for text, meta in formed:
        value = json.loads(text)
        assert value["a"] in ("x", "yy") and isinstance(value["b"], bool) and set(value) == {"a", "b"}
        assert meta["finish_reason"] == "stop"
    parts = [chunk.meta["tool_call"] for chunk in calls if "tool_call" in chunk.meta]
    assert [part["name"] for part in parts if "name" in part] == ["look"]
    assert set(json.loads("".join(part["arguments"] for part in parts))) == {"far"}
    assert not any(chunk.text for chunk in calls)
    assert calls[-1].meta["finish_reason"] == "tool_calls"


async def test_a_grammar_that_takes_long_to_compile_stops_nobody(stage: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages.ar.structured import Grammars

    compile_one, may_go, begun = Grammars._compile, threading.Event(), threading.Event()

    def slow(self: Grammars, grammar: Any) -> Any:
        begun.set()
        assert may_go.wait(60)
        return compile_one(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", slow)
    waiting = asyncio.create_task(run(stage, name="slow", regex="[ab]{3}", temperature=1.0))
    await asyncio.to_thread(begun.wait, 60)
    assert (await run(stage, max_tokens=3))[1]["usage"]["completion_tokens"] > 0
    assert not waiting.done()
    may_go.set()
    text, meta = await waiting
    assert re.fullmatch("[ab]{3}", text)
    assert meta["finish_reason"] == "stop"


def test_a_checkpoint_that_does_not_fill_the_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    gone = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"), loaded(tmp_path):
        pass
    save_file(
        {**weights, "model.layers.1.mlp.up_proj.weight": gone, "stray": gone.clone()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ConfigError, match="unexpected keys: stray"), loaded(tmp_path):
        pass


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a causal language model"), loaded(tmp_path):
        pass


async def test_random_weights_of_a_shape_can_be_run(tiny: Path) -> None:
    from streamrt import weights

    with loaded(tiny, resolve=weights.parse, model=f"random:{tiny}/config.json", max_tokens=2) as stage:
        assert (await run(stage))[1]["usage"]["completion_tokens"] > 0


async def test_an_int8_conversation_says_the_same_with_and_without_the_cache(tiny: Path) -> None:
    turns = [{"role": "user", "content": "the quick brown fox"}]
    with loaded(tiny, dtype="int8", max_tokens=24) as stage:
        assert stage.describe()["dtype"] == "int8"
        turns += [{"role": "assistant", "content": (await run(stage, turns))[0]}, {"role": "user", "content": "hello"}]
        hit, meta = await run(stage, turns)
        assert meta["usage"]["cached_tokens"] > 10
    with loaded(tiny, dtype="int8", max_tokens=24, prefix_cache=False) as cold:
        assert (await run(cold, turns))[0] == hit


@pytest.mark.parametrize("has_vnni", [False, True])
def test_int8_layers_are_close_to_the_linear_ones_beside_an_outlier(has_vnni: bool) -> None:
    from stages.ar.int8 import Int8Linear
    from stages.ar.loading import CPU_INFO, cpu_flags

    if has_vnni and not cpu_flags(CPU_INFO.read_text()) & {"avx512_vnni", "avx_vnni"}:
        pytest.skip("this processor has no VNNI")
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 64)
    x = torch.randn(5, 256)
    x[0] *= 1000
    with torch.inference_mode():
        quantized, expected = Int8Linear(linear, has_vnni=has_vnni), linear(x)
        error = (quantized(x) - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert error.max() < 0.05
        assert torch.equal(quantized(x)[1:2], quantized(x[1:2]))


async def test_smollm2_knows_the_capital_of_france() -> None:
    from streamrt import weights

    folder = weights.fetch("weights:smollm2-135m-instruct")
    assert isinstance(folder, Path)
    with loaded(folder, instructions="Answer in one short sentence.", max_tokens=24, dtype="float32") as stage:
        text, meta = await run(stage, "What is the capital of France?")
    assert "Paris" in text
    assert meta["finish_reason"] == "stop"
