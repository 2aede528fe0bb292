"""Tokenizers and chat templates, against `transformers` on the same directory."""

import json
from threading import Event, Thread

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer

from lockstep.errors import LockstepError
from lockstep.model import Tokenizer, train_bpe
from lockstep.model.chat_template import render

TEXTS = ["Hello world, hello again: 12 34 times. ", "def f(x):\n    return x + 1\n", "ünïcödé 漢字 🙂"] * 20
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&"}]


@pytest.fixture(scope="module")
def trained():
    return train_bpe(iter(TEXTS), 320)


def test_other_threads_run_while_a_long_text_is_tokenized(trained):
    """A server's loop is one of them."""
    ticks, ended = [], Event()

    def tick():
        while not ended.wait(0.001):
            ticks.append(None)

    ticking = Thread(target=tick)
    ticking.start()
    ids = trained.encode(TEXTS[0] * 4000)
    ended.set()
    ticking.join()
    assert len(ids) > 4000
    assert len(ticks) > 10
    assert trained.longest == max(len(trained.token(index)) for index in range(trained.vocab_size))


@pytest.mark.parametrize("text", [*TEXTS[:3], "", " ", "never seen: Ωmega \x00\t\r\n"])
def test_text_survives(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_training_is_deterministic_and_checked(trained):
    again = train_bpe(iter(TEXTS), 320)
    assert again.backend.to_str() == trained.backend.to_str()
    assert trained.vocab_size <= 320
    assert [trained.token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (trained.eos_ids, trained.bos_id) == ({0, 2}, None)
    with pytest.raises(LockstepError, match="vocab_size 100"):
        train_bpe(iter(TEXTS), 100)


def test_special_tokens_in_text_are_tokens_and_can_be_skipped(trained):
    ids = trained.encode("a<|im_end|>b")
    assert 2 in ids
    assert trained.decode(ids) == "ab"
    assert trained.decode(ids, skip_special=False) == "a<|im_end|>b"


def test_directory_round_trip_and_transformers_agree(trained, tmp_path):
    trained.save(tmp_path)
    back, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (back.eos_ids, back.bos_id, back.pad_id, back.template) == (
        trained.eos_ids, trained.bos_id, trained.pad_id, trained.template)  # fmt: skip
    for text in TEXTS[:3]:
        assert back.encode(text) == trained.encode(text) == theirs(text)["input_ids"]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)
        assert back.render(MESSAGES, prompt) == expected
        assert back.chat(MESSAGES, prompt) == theirs(expected, add_special_tokens=False)["input_ids"]


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n  {% endif %}\n"
    "{% endfor %}{{ eos_token }}",
    "{% for m in messages %}{{ m | tojson }}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ tools | tojson(indent=2) if tools else 'none' }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"name": "ärger", "parameters": {"a": "<1>"}}]])
def test_templates_render_as_in_transformers(template, tools, trained, tmp_path):
    trained.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.update(chat_template=template, bos_token="<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.render(MESSAGES, tools=tools) == theirs.apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False
    )


def test_half_a_surrogate_pair_is_no_text(trained):
    with pytest.raises(LockstepError, match="half a surrogate pair"):
        trained.encode("a\ud800")
    with pytest.raises(TypeError):
        trained.encode(5)


def test_template_errors_are_lessons(trained):
    with pytest.raises(LockstepError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", MESSAGES)
    with pytest.raises(LockstepError, match="chat template"):
        render("{% for %}", MESSAGES)
    with pytest.raises(LockstepError, match="chat template"):  # the sandbox
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}", MESSAGES)
    with pytest.raises(LockstepError, match="chat template refuses these messages"):
        render("{{ messages[0]['content'] + 5 }}", MESSAGES)
    with pytest.raises(LockstepError, match="no chat template"):
        Tokenizer(trained.backend).chat(MESSAGES)
    assert len(render("{{ strftime_now('%Y') }}", MESSAGES)) == 4


def test_template_file_and_named_templates(trained, tmp_path):
    trained.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_dir(tmp_path).template == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_dir(tmp_path).template == "file"


def test_sentencepiece_style_tokenizer_loads(tmp_path):
    """Metaspace and byte fallback, as in Llama 2, Mistral and Gemma."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    for piece in ("▁", "h", "i", "▁h", "▁hi"):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab, [("▁", "h"), ("▁h", "i")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("hi ö") == [vocab["▁hi"], vocab["▁"], vocab["<0xC3>"], vocab["<0xB6>"]]
    assert tokenizer.decode(tokenizer.encode("hi ö")) == "hi ö"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2, 5})


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [("tokenizer.json", None, "no tokenizer.json"), ("tokenizer.json", "{}", "tokenizer.json is not"),
     ("tokenizer_config.json", "{", "tokenizer_config.json is not valid"),
     ("tokenizer_config.json", "[]", "must hold a JSON object")],
)  # fmt: skip
def test_damaged_directories_are_named(file, content, named, trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(LockstepError, match=named):
        Tokenizer.from_dir(tmp_path)
