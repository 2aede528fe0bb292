"""Structured output: what comes out always parses, whatever the tiny random model would rather say."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import llguidance
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.serve import Engine, SamplingParams, StructuredOutputs
from lockstep.serve.sampler import sample
from lockstep.serve.structured import Guide, Guides
from tests.serve.tiny import page_bytes

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"enum": ["x", 1, None, "Grüße 🙂"]},
        {"const": {"k": [1, 2]}},
    ]
)


def _compound(inner: st.SearchStrategy) -> st.SearchStrategy:
    names = st.sampled_from(["a", "b", "ü", 'q"q'])
    properties = st.dictionaries(names, inner, min_size=1, max_size=3)
    return (
        properties.map(
            lambda p: {"type": "object", "properties": p, "required": sorted(p)[:1], "additionalProperties": False}
        )
        | inner.map(lambda i: {"type": "array", "items": i, "minItems": 1, "maxItems": 2})
        | st.tuples(inner, inner).map(lambda two: {"anyOf": list(two)})
    )


SCHEMAS = st.recursive(LEAVES, _compound, max_leaves=4)


def fits(value: object, schema: dict) -> bool:
    """A plain validator of the keywords used here."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(fits(v, known[k]) for k, v in value.items())
            )
        case "array":
            low, high = schema.get("minItems", 0), schema["maxItems"]
            return (
                isinstance(value, list) and low <= len(value) <= high and all(fits(v, schema["items"]) for v in value)
            )
        case "string":
            long = len(value) <= schema.get("maxLength", 99) if isinstance(value, str) else False
            return long and re.search(schema.get("pattern", ""), value) is not None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
    return value is None


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, debug=True)


def ask(engine, structure, seed=0, prompt="the quick brown", **more):
    params = {"max_tokens": 800, "seed": seed, "structured_outputs": structure, **more}
    return engine.generate([prompt], SamplingParams(**params))


@given(SCHEMAS, st.integers(0, 10**6))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_follows_a_schema_parses_and_fits(engine, schema, seed):
    (done,) = ask(engine, {"json": schema}, seed)
    assert done.finish_reason == "stop"
    assert fits(json.loads(done.text), schema), (done.text, schema)


@pytest.mark.parametrize("seed", range(2))
def test_json_object_regex_choice_and_grammar(engine, seed):
    (whole,) = ask(engine, {"json_object": True}, seed, max_tokens=100)
    assert whole.finish_reason == "length" or isinstance(json.loads(whole.text), dict)
    assert whole.text.lstrip().startswith("{")
    assert re.fullmatch(r"[0-9]{3}-(ab|cd)+x", ask(engine, {"regex": "[0-9]{3}-(ab|cd)+x"}, seed)[0].text)
    assert ask(engine, {"choice": ("yes", 'no "q"')}, seed)[0].text in ("yes", 'no "q"')
    assert re.fullmatch("a+b", ask(engine, {"grammar": 'start: "a" start | "ab"'}, seed)[0].text)


def test_reported_logprobs_are_those_of_the_raw_distribution(engine, model):
    (done,) = ask(engine, {"json": PERSON}, logprobs=2)
    teacher = model.logprobs(done.prompt_token_ids + done.token_ids)[-len(done.token_ids) :]
    assert np.asarray(done.logprobs, np.float32).tobytes() == teacher.numpy().tobytes()


def test_batch_guesses_preemption_and_cuts_change_nothing(model, engine):
    asked = [
        SamplingParams(n=2, max_tokens=300, seed=seed, structured_outputs={"json": PERSON}, logprobs=0, **more)
        for seed, more in enumerate([{}, {"top_p": 0.8}, {"temperature": 0.0}, {"stop": '"age"'}, {"ignore_eos": True}])
    ]
    prompts = [f"{'the lazy dog ' * (4 * i + 1)}" for i in range(len(asked))]
    alone = [done for p, one in zip(prompts, asked, strict=True) for done in engine.generate([p], one)]
    crowded = Engine(model, kv_memory=7 * page_bytes(model), max_batch_tokens=24, drafts=4, debug=True)
    together = crowded.generate(prompts, asked)
    assert crowded.stats().preemptions
    assert [(d.token_ids, d.text, d.logprobs, d.finish_reason) for d in together] == [
        (d.token_ids, d.text, d.logprobs, d.finish_reason) for d in alone
    ]
    for done in together:
        if done.stop_reason != '"age"':
            assert done.finish_reason == "length" or fits(json.loads(done.text), PERSON)


def test_right_guesses_are_taken_within_a_structure(model):
    engine = Engine(model, drafts=4, debug=True)
    structure = {"regex": "(abcabc){20}"}
    (guessed,) = ask(engine, structure)
    assert guessed.text == "abcabc" * 20
    assert engine.stats().steps < len(guessed.token_ids)
    assert engine.stats().right_guesses > 10


def test_masks_are_computed_while_the_forward_pass_runs(model, monkeypatch):
    engine = Engine(model, drafts=2, debug=True)
    run, ready = engine._runner.run, []

    def watched(step, rows):
        hidden = run(step, rows)
        asked = [guide._ahead for guide in engine._guides.values() if guide._ahead is not None]
        wait(asked, timeout=30)  # whoever waited for the pass to end would not be done before it does
        ready.append((len(asked), all(future.done() for future in asked)))
        return hidden

    monkeypatch.setattr(engine._runner, "run", watched)
    (done,) = ask(engine, {"json": PERSON}, temperature=0.0)
    assert fits(json.loads(done.text), PERSON)
    assert len(ready) > 3
    assert ready == [(1, True)] * len(ready)


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 4))
@settings(deadline=None)
def test_masks_known_ahead_are_those_of_a_guide_that_walks(engine, words, right):
    """Whatever is guessed, and wherever the guesses stop to be what is drawn."""
    pieces = ["a", "b", "ab", "{"]
    ids = [engine.model.tokenizer.encode(piece)[0] for piece in pieces]
    structure = StructuredOutputs(regex="[ab]{3,6}")
    ahead, plain = engine.guides.guide(structure), engine.guides.guide(structure)
    guesses = tuple(ids[word] for word in words)
    with ThreadPoolExecutor(1) as helper:
        ahead.look_ahead(guesses, helper)
        for guess in (*guesses[:right], ids[0]):
            mask = plain.allowed()
            assert mask.tobytes() == ahead.allowed().tobytes()
            token = guess if mask[guess] else int(mask.argmax())
            plain.accept(token)
            ahead.accept(token)
            assert plain.finished == ahead.finished
            if plain.finished or token != guess:
                break


def test_the_mask_comes_before_top_k_and_top_p():
    row = np.array([9, 5, 4, 3], dtype=np.float32)
    allowed = np.array([False, False, True, True])
    for more in ({"top_k": 1}, {"top_p": 0.1}, {"temperature": 0.0}, {"min_p": 1.0}):
        assert sample(row, SamplingParams(**more), [1], 1, 0, 0, allowed) == 2
    drawn = {sample(row, SamplingParams(top_k=3, top_p=0.999), [1], 1, seed, 0, allowed) for seed in range(50)}
    assert drawn == {2, 3}


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        ({"json": {"type": "foo"}}, "JSON schema cannot be followed: Invalid type: foo"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": "[1"}, "JSON schema cannot"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"regex": "(a"}, "regular expression cannot be followed.*unclosed group"),
        ({"grammar": "start: foo"}, "grammar cannot be followed.*unknown name"),
        ({"choice": ()}, "one text or more"),
        ({}, "is empty: give exactly one"),
        ({"json": {}, "regex": "a"}, "has json and regex"),
        ({"schema": {}}, "mapping with one of json, json_object"),
    ],
)
def test_wrong_structures_say_what_is_wrong(engine, structure, said):
    with pytest.raises(LockstepError, match=said):
        ask(engine, structure)


def test_a_grammar_that_grows_too_complex_ends_only_its_own_request(model, monkeypatch):
    engine = Engine(model, debug=True)
    words = llguidance.LLTokenizer(model.tokenizer.backend.to_str(), eos_token=[0, 2])
    tight = llguidance.LLParserLimits(step_max_items=1, step_lexer_fuel=1)
    matcher = llguidance.LLMatcher(words, StructuredOutputs(json=PERSON).compiled(), limits=tight, log_level=0)
    monkeypatch.setattr(engine.guides, "guide", lambda structure: Guide(matcher, model.config.vocab_size))
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    stuck, fine = engine.generate(["a", "b"], [SamplingParams(structured_outputs={"json": PERSON}), plain])
    assert (stuck.finish_reason, fine.finish_reason) == ("abort", "length")
    assert "ask for a simpler one" in stuck.error


@pytest.mark.parametrize(
    "structure",
    [
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(5000)) + '\na5000: "x"'},
        {
            "json": {
                "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)} | {"a5000": {"const": 1}},
                "$ref": "#/$defs/a0",
            }
        },
    ],
)
def test_rules_within_rules_do_not_end_the_process(engine, structure):
    """The compiler recurses as deep as they go: on an ordinary stack this is a segmentation fault."""
    (answer,) = ask(engine, structure, max_tokens=2)
    assert answer.text in ("x", "1")


def test_many_choices(engine):
    (answer,) = ask(engine, {"choice": [f"v{i}" for i in range(3000)]}, max_tokens=9)
    assert answer.text[0] == "v"
    with pytest.raises(LockstepError, match="characters, and at most 524288 are read"):
        ask(engine, {"choice": [f"v{i}" for i in range(60_000)]})


def test_a_slow_compile_holds_nobody_up(model, monkeypatch):
    """The engine's thread gets the guide of a known structure while another one is compiled."""
    guides = Guides(model.tokenizer, model.config.vocab_size, frozenset({0}))
    known, slow = StructuredOutputs(choice=("a",)), StructuredOutputs(choice=("b",))
    guides.check(known)
    begun, go_on = Event(), Event()

    def wait_first(structure: StructuredOutputs) -> None:
        begun.set()
        assert go_on.wait(10)

    monkeypatch.setattr(guides, "_compiled", wait_first)
    with ThreadPoolExecutor() as pool:
        pool.submit(guides.check, slow)
        assert begun.wait(10)
        pool.submit(guides.guide, known).result(5)
        go_on.set()


def test_structures_are_values():
    assert StructuredOutputs(json={"a": 1}) == StructuredOutputs(json='{"a": 1}')
    assert hash(StructuredOutputs(choice=("a", "b"))) == hash(StructuredOutputs(choice=("a", "b")))


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def response_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


def test_chat_and_completions_over_http(client):
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "who?"}], n=2, seed=1, max_tokens=300,
        response_format=response_format(PERSON),
    )  # fmt: skip
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        assert fits(json.loads(choice.message.content), PERSON)
    stream = client.completions.create(
        model="tiny", prompt="who?", seed=2, max_tokens=300, stream=True,
        extra_body={"response_format": response_format(PERSON)},
    )  # fmt: skip
    assert fits(json.loads("".join(event.choices[0].text for event in stream)), PERSON)
    word = client.completions.create(
        model="tiny", prompt="who?", extra_body={"structured_outputs": {"choice": ["me", "you"]}}
    )
    assert word.choices[0].text in ("me", "you")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": response_format({"type": "foo"})}, "Invalid type: foo"),
        ({"response_format": response_format([])}, "response_format.json_schema.schema is a list"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs must have exactly one"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give one"),
    ],
)
def test_wrong_formats_are_400s(client, body, said):
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        client.completions.create(model="tiny", prompt="x", extra_body=body)


def test_compiled_structures_are_kept_as_long_as_they_are_small(model):
    guides = Guides(model.tokenizer, model.config.vocab_size, frozenset({0}))
    small, large = (
        StructuredOutputs(choice=("a",)),
        [StructuredOutputs(grammar=f'start: "{i}" // {"b" * 400_000}') for i in range(3)],
    )
    for one in (small, *large):
        guides.check(one)
    assert [guides.knows(one) for one in (small, *large)] == [False, False, True, True]
