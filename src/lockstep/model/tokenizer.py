"""Text to token ids and back: a `tokenizers` tokenizer with its special tokens and chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from lockstep.errors import LockstepError
from lockstep.model.files import read_json, write_json

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template of tokenizers trained here: ChatML."""


@dataclass(frozen=True)
class Tokenizer:
    """Token ids of a text and the text of token ids.

    `settings` are the keys of tokenizer_config.json that came with it; they are written back by `save`.
    """

    backend: Backend
    template: str | None = None
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    pad_id: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids. add_special: with what the model starts a sequence with (a BOS, for some models)."""
        try:
            # A batch of one: only while it encodes batches does the library let other threads run.
            return self.backend.encode_batch([text], add_special_tokens=add_special)[0].ids
        except TypeError as error:
            if not isinstance(text, str):
                raise
            # What the library says to half a surrogate pair, which is how Python holds bytes that are no UTF-8.
            raise LockstepError("the text is not Unicode: it holds half a surrogate pair, or was not UTF-8") from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of these ids; bytes that are no UTF-8 come out as U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template; see `render`."""
        return self.encode(self.render(messages, add_generation_prompt, tools, **variables), add_special=False)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text. messages: dicts with `role` and `content`. variables: what else the template may read, such
        as enable_thinking. LockstepError without a template."""
        if self.template is None:
            raise LockstepError(
                "this model has no chat template, so messages cannot become a prompt: "
                "use text completion, or put a chat_template into the directory's tokenizer_config.json"
            )
        names: dict[str, Any] = {"bos_token": self.token(self.bos_id), "eos_token": self.token(self._eos_id)}
        from lockstep.model import chat_template  # jinja2 is not needed where only tokens come in

        names |= {"add_generation_prompt": add_generation_prompt, "tools": tools}
        return chat_template.render(self.template, messages, **(variables | names))

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every token has the same number in both."""
        return self.backend.get_vocab() == other.backend.get_vocab()

    def token(self, index: int | None) -> str:
        """The text of a token as the vocabulary spells it; "" for None."""
        return "" if index is None else (self.backend.id_to_token(index) or "")

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text has at least so many tokens as it has times these."""
        return max(map(len, self.backend.get_vocab()))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def _eos_id(self) -> int | None:
        """The one eos token that tokenizer_config.json has room for."""
        named = self.settings.get("eos_token")
        index = self.backend.token_to_id(_text(named)) if named else None
        return min(self.eos_ids, default=None) if index is None else index

    @staticmethod
    def from_dir(path: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and the eos ids of a model directory."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise LockstepError(
                f"{directory} has no tokenizer.json: a directory written by `transformers` or `lockstep export` has "
                "one (AutoTokenizer.from_pretrained(...).save_pretrained makes one of a sentencepiece tokenizer.model)"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise LockstepError(f"{file} is not a readable tokenizer: {error}") from error
        settings = _optional(directory / "tokenizer_config.json")
        generation = _optional(directory / "generation_config.json") or _optional(directory / "config.json")
        return _assemble(backend, settings, generation, _template(directory, settings))

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json into an existing directory."""
        directory = Path(path)
        (directory / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        names = {"bos_token": self.bos_id, "eos_token": self._eos_id, "pad_token": self.pad_id}
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= {name: self.token(index) for name, index in names.items() if index is not None}
        settings |= self.settings
        if self.template is not None:
            settings["chat_template"] = self.template
        write_json(directory / "tokenizer_config.json", settings)
        ids = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids) or None, "pad_token_id": self.pad_id}
        write_json(directory / "generation_config.json", {k: v for k, v in ids.items() if v is not None})


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on these texts, with a ChatML template. Deterministic.

    Tokens 0, 1, 2 are <|endoftext|> (ends a document), <|im_start|> and <|im_end|>. Digits stand alone, words split
    as in GPT-2. A small corpus may yield fewer than vocab_size tokens: size the model by `Tokenizer.vocab_size`.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    least = 256 + len(special)
    if vocab_size < least:
        raise LockstepError(
            f"vocab_size {vocab_size} is too small: 256 bytes and 3 special tokens need {least}; raise model.vocab_size"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = byte_level("smollm")
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return Tokenizer(backend, CHATML, bos_id=None, eos_ids=frozenset({0, 2}), pad_id=0)


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLITS = {"llama-bpe": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", "")}
"""Word-splitting expressions of the byte-level tokenizers that have one of their own."""


def byte_level(kind: str) -> pre_tokenizers.PreTokenizer:
    """How text splits into words before BPE: gpt-2, smollm (gpt-2, digits alone), llama-bpe or qwen2."""
    if kind in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[kind]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _assemble(
    backend: Backend, settings: dict[str, Any], generation: dict[str, Any], template: str | None
) -> Tokenizer:
    def index(name: str) -> int | None:
        token = settings.get(f"{name}_token")
        found = backend.token_to_id(_text(token)) if token else None
        listed = generation.get(f"{name}_token_id")
        return listed if found is None and isinstance(listed, int) else found

    ends = generation.get("eos_token_id")
    eos = [ends] if isinstance(ends, int) else list(ends or [])
    own = index("eos")
    if own is not None:
        eos.append(own)
    kept = {k: v for k, v in settings.items() if k not in ("chat_template", "added_tokens_decoder")}
    return Tokenizer(backend, template, index("bos"), frozenset(eos), index("pad"), kept)


def _text(token: Any) -> str:
    """A special token in tokenizer_config.json is a string or a mapping with its content."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
