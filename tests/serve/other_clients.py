"""Clients that are not the `openai` package, against a running server: `python tests/serve/other_clients.py URL`.

They live in an environment of their own (benchmarks/clients.sh makes it): this file imports nothing of the project.
"""

from __future__ import annotations

import sys

import litellm
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

MESSAGES = [{"role": "user", "content": "the quick"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


def with_litellm(url: str) -> str:
    asked = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES, **GREEDY}
    whole = litellm.completion(**asked).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
    assert streamed == whole, (streamed, whole)
    try:
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "fox " * 3000}]})
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that is too long was answered")
    vectors = litellm.embedding("openai/tiny", input=["a", "b"], api_base=f"{url}/v1", api_key="none").data
    assert len(vectors) == 2
    return whole


def with_langchain(url: str) -> str:
    chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", max_retries=0, **GREEDY)
    whole = chat.invoke([HumanMessage("the quick")])
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream([HumanMessage("the quick")])) == whole.content
    assert len(chat.batch([[SystemMessage("be brief"), HumanMessage("fox")]] * 4)) == 4
    responses = chat.model_copy(update={"use_responses_api": True})
    assert responses.invoke([HumanMessage("the quick")]).text == whole.content
    texts = OpenAIEmbeddings(model="tiny", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    assert len(texts.embed_documents(["a", "b"])) == 2
    return whole.content


if __name__ == "__main__":
    answers = {with_litellm(sys.argv[1]), with_langchain(sys.argv[1])}
    assert len(answers) == 1, answers
    print("litellm and langchain-openai get the same answer")
