"""A tokenizer whose template knows tools and thoughts, and whose last two tokens are the marks of a thought."""

from __future__ import annotations

import json
from dataclasses import replace

from tokenizers import Tokenizer as Backend

from lockstep.model.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}\n{% endfor %}"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


def thinking(tokenizer: Tokenizer) -> Tokenizer:
    """The tiny tokenizer with all of that."""
    told = json.loads(tokenizer.backend.to_str())
    vocabulary, merges = told["model"]["vocab"], told["model"]["merges"]
    for mark, index in (("</think>", len(vocabulary) - 1), ("<think>", len(vocabulary) - 2)):
        old = next(name for name, number in vocabulary.items() if number == index)
        told["model"]["merges"] = merges = [pair for pair in merges if "".join(pair) != old and old not in pair]
        del vocabulary[old]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        told["added_tokens"].append({"id": index, "content": mark, **flags})
        vocabulary[mark] = index
    return replace(tokenizer, backend=Backend.from_str(json.dumps(told)), template=TEMPLATE)
