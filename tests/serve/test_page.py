"""The web page in a headless Chromium, on a server with the tiny model: as a person uses it, without a network."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests import chromium
from tests.chromium import browser as browser
from tests.serve.conftest import server

expect.set_options(timeout=30_000)  # a busy machine is no failure
pytestmark = chromium.needed


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, of which every error in the console and every request to elsewhere is a failure."""
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    opened.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(url) else None)
    opened.goto(url)
    expect(opened.locator("#state")).to_have_text("ready")
    yield opened
    context.close()
    assert not [text for text in wrong if "Failed to load resource" not in text]


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def tokens(page: Page, most: int) -> None:
    """Let answers have so many tokens: the drawn ones of a random model may end at once."""
    go_on(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill(str(most))
    page.get_by_role("button", name="Close settings").click()


def go_on(page: Page, **changes: int) -> None:
    """Let answers go on past the tokens that end one, with these changes to what the page asks for."""

    def changed(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        route.continue_(post_data=json.dumps({**body, "ignore_eos": True, "seed": 1, **changes}))

    page.route("**/v1/chat/completions", changed)


def endless(page: Page) -> None:
    go_on(page, max_tokens=950)


def chunk(text: str, finish: str | None = None, kind: str = "content") -> str:
    """An event of a stream that says this."""
    score = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}
    choice = {"delta": {kind: text}, "logprobs": {"content": [score]}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def says(page: Page, *texts: str) -> None:
    """Let the server's next answers be this text, in these pieces."""
    body = "".join(map(chunk, texts)) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_an_answer_comes_with_its_numbers_and_probabilities(page: Page, url: str) -> None:
    tokens(page, 30)
    ask(page, "the quick")
    foot = page.locator(".foot")
    expect(foot).to_contain_text("tokens/s")
    expect(foot).to_contain_text(re.compile(r"prompt \d+ tokens, \d+ from the cache"))
    shown = page.locator(".assistant .token")
    assert shown.count() > 3
    shown.nth(1).hover()
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_visible()
    expect(tip.locator("tr.drawn")).to_contain_text("%")
    assert tip.locator("tr").count() >= 5
    page.locator("#prompt").hover()
    expect(tip).to_be_hidden()
    page.locator(".assistant .text").focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_be_visible()
    assert page.locator(".token.here").count() >= 1


def test_the_tokens_shown_are_the_text(page: Page) -> None:
    tokens(page, 60)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "the lazy dog")
    expect(page.locator(".foot")).to_contain_text("tokens/s")
    body = json.loads(asked.value.post_data or "")
    assert body["max_tokens"] == 60
    assert body["messages"] == [{"role": "user", "content": "the lazy dog"}]
    assert body["stream"] is body["logprobs"] is True


def test_stop_then_regenerate_then_a_second_turn(page: Page) -> None:
    endless(page)
    ask(page, "the quick")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.locator(".assistant .token").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".foot")).to_contain_text("stopped")
    page.unroute("**/v1/chat/completions")
    tokens(page, 8)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".foot")).to_contain_text("tokens/s")
    assert page.locator(".assistant").count() == 1
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "and then")
    roles = [message["role"] for message in json.loads(asked.value.post_data or "")["messages"]]
    assert roles == ["user", "assistant", "user"]
    expect(page.locator(".foot")).to_have_count(2)
    assert page.get_by_role("button", name="Regenerate").count() == 1
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_stopping_frees_the_pages(page: Page, url: str) -> None:
    endless(page)
    ask(page, "the quick")
    expect(page.locator(".assistant .token").first).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".foot")).to_contain_text("stopped")
    for _ in range(100):
        text = httpx.get(f"{url}/metrics").text
        if re.search(r"^vllm:num_requests_running\{.*\} 0\.0$", text, re.MULTILINE):
            return
        page.wait_for_timeout(50)
    raise AssertionError("the request runs on")


def test_markdown_becomes_elements_and_html_stays_text(page: Page) -> None:
    evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> '
    says(
        page, "# Title\n\nSome **bold", "** and `co", "de`.\n\n", evil, "\n\n- one\n- two\n  - inner\n\n```py",
        "thon\nprint('<b>')\n```\n\n[bad](javascript:alert(1)) [good](https://example.org/a)\n\n| a | b |\n|---|---|\n",
        "| 1 | 2 |\n",
    )  # fmt: skip
    ask(page, "x")
    text = page.locator(".assistant .text")
    expect(page.locator(".foot")).to_be_visible()
    expect(text.locator("h1")).to_have_text("Title")
    expect(text.locator("strong")).to_have_text("bold")
    expect(text.locator("p code")).to_have_text("code")
    expect(text.locator("pre code")).to_have_text("print('<b>')")
    expect(text.locator("ul > li")).to_have_count(3)
    expect(text.locator("td")).to_have_text(["1", "2"])
    expect(text).to_contain_text('<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>')
    assert text.locator("img, script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert [link.get_attribute("href") for link in text.locator("a").all()] == ["https://example.org/a"]
    # A token that lies in two elements is marked in both.
    assert text.locator('p > [data-token="1"], code [data-token="1"]').count() == 2


GROWING = """
Text of a first paragraph
which goes on.
- one
- two

  still two
  - inner

1. first
2. second

> a quote
> of two lines

| a | b |
|---|---|
| 1 | `2|` |
# Title
```python
print("-")

- no list
```
~~~
open fence
~~~
***
last **word** 🙂 and é
"""


def test_an_answer_that_grows_is_that_of_its_whole_text(page: Page) -> None:
    """Drawn after every character it has the elements of the text drawn at once, and those above stay the same ones."""
    script = """async (text) => {
      const { Answer } = await import("/web/answer.js");
      const bytes = (piece) => [...new TextEncoder().encode(piece)];
      const chunk = (piece) => ({ choices: [{ delta: { content: piece }, logprobs: { content: [
        { token: piece, logprob: -1, bytes: bytes(piece), top_logprobs: [] }] } }] });
      const whole = new Answer();
      const grown = new Answer();
      const kept = [];
      for (const piece of text) {
        whole.take(chunk(piece));
        grown.take(chunk(piece));
        grown.draw();
        while (kept.length < grown.settled) kept.push(grown.element.children[kept.length]);
      }
      whole.end();
      grown.end();
      return [grown.element.innerHTML, whole.element.innerHTML, kept.length,
              kept.every((element, i) => element === grown.element.children[i])];
    }"""
    grown, whole, kept, same = page.evaluate(script, GROWING.lstrip())
    assert grown == whole
    assert "<h1>" in whole
    assert "<blockquote>" in whole
    assert kept >= 9
    assert same


def test_thoughts_are_shown_apart(page: Page) -> None:
    """Their tokens are none of the answer's, and are not sent back with it."""
    pieces = [
        chunk("hm <b>", kind="reasoning_content"),
        chunk(" 3?", kind="reasoning_content"),
        chunk("Three"),
        chunk("."),
    ]
    body = "".join([*pieces, "data: [DONE]\n\n"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page, "1 + 2?")
    expect(page.locator(".foot")).to_be_visible()
    thought = page.locator(".assistant .thought")
    thought.locator("summary").click()
    expect(thought).to_contain_text("hm <b> 3?")
    assert page.locator(".assistant .token").all_text_contents() == ["Three", "."]
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "and then")
    assert json.loads(asked.value.post_data or "")["messages"][1] == {"role": "assistant", "content": "Three."}


def test_errors_are_told_and_can_be_tried_again(page: Page) -> None:
    tokens(page, 4)
    ask(page, "fox " * 2000)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("maximum context length is 1024 tokens")
    page.get_by_role("button", name="New chat").click()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "the")
    expect(alert).to_contain_text("cannot be reached")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".foot")).to_contain_text("tokens/s")
    expect(alert).to_have_count(0)


def test_a_stream_that_breaks_off_keeps_what_came(page: Page) -> None:
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=chunk("so far"), content_type="text/event-stream")
    )
    ask(page, "x")
    expect(page.get_by_role("alert")).to_contain_text("before it was complete")
    expect(page.locator(".assistant .text")).to_have_text("so far")


def test_settings_are_sent_kept_and_reset(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("System message").fill("be brief")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Most tokens").fill("3")
    page.reload()
    expect(page.locator("#state")).to_have_text("ready")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "hi")
    body = json.loads(asked.value.post_data or "")
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0, 7, 3)
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Back to defaults").click()
    expect(page.get_by_label("Temperature")).to_have_value("0.7")


def test_a_reload_keeps_the_conversation(page: Page) -> None:
    """Each with its probabilities and numbers, until a new chat is begun; another tab has its own."""
    body = "".join([chunk("hm", kind="reasoning_content"), chunk("**Three**"), chunk(".", "stop"), "data: [DONE]\n\n"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    for count, text in enumerate(["1 + 2?", "sure?\n<b>"], 1):
        ask(page, text)
        expect(page.locator(".foot")).to_have_count(count)
    shown = page.locator("#log").inner_html()
    page.reload()
    expect(page.locator(".foot")).to_have_count(2)
    assert page.locator("#log").inner_html() == shown
    page.locator(".assistant .token").last.hover()
    expect(page.get_by_role("tooltip").locator("tr.drawn")).to_contain_text("60.7 %")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("#state")).to_have_text("ready")
    assert other.locator(".turn").count() == 0
    other.close()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".foot")).to_have_count(2)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "and 3?")
    answer = {"role": "assistant", "content": "**Three**."}
    questions = [{"role": "user", "content": text} for text in ("1 + 2?", "sure?\n<b>", "and 3?")]
    assert json.loads(asked.value.post_data or "")["messages"] == [
        questions[0], answer, questions[1], answer, questions[2],
    ]  # fmt: skip
    expect(page.locator(".foot")).to_have_count(3)
    page.get_by_role("button", name="New chat").click()
    page.reload()
    expect(page.locator("#state")).to_have_text("ready")
    assert page.locator(".turn").count() == 0


def test_a_reload_in_the_midst_of_an_answer_keeps_what_came(page: Page) -> None:
    endless(page)
    ask(page, "the quick")
    expect(page.locator(".assistant .token").nth(2)).to_be_visible()
    page.reload()
    expect(page.locator(".user .text")).to_have_text("the quick")
    expect(page.locator(".foot")).to_contain_text("not complete")
    assert page.locator(".assistant .token").count() >= 3
    page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("has no answer yet")
    page.unroute_all()
    tokens(page, 4)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".foot")).to_contain_text("4 tokens")


def test_what_cannot_be_kept_or_read_is_left_out(page: Page) -> None:
    """Where there is little room the text is kept without probabilities; what is no conversation is none."""
    full = """() => {
      sessionStorage.setItem("room", "x".repeat(1500));
      for (let size = 2 ** 23; size >= 1; size /= 2) {
        try {
          sessionStorage.setItem("filler" + size, "x".repeat(size));
        } catch {}
      }
      sessionStorage.removeItem("room");
    }"""
    says(page, *["word "] * 40)
    page.evaluate(full)
    ask(page, "x")
    expect(page.locator(".foot")).to_be_visible()
    page.reload()
    expect(page.locator(".assistant .text")).to_have_text("word " * 39 + "word")
    assert page.locator(".assistant .token").count() == 0
    user = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y", "thought": "", "facts": [], "tokens": []}
    wrong = [
        "{", "null", "5", '"x"', "{}", [1], [answer], [user, user], [user, {**answer, "content": 1}],
        [user, {**answer, "thought": None}], [user, {**answer, "facts": "x"}], [user, {**answer, "tokens": [{}]}],
        [user, {**answer, "tokens": [{"from": 0, "to": 1, "score": {"token": 1, "logprob": 0, "top_logprobs": []}}]}],
    ]  # fmt: skip
    read = """async (texts) => {
      const { keptTurns } = await import("/web/kept.js");
      sessionStorage.clear();
      return texts.map((text) => {
        sessionStorage.setItem("lockstep.chat", text);
        return keptTurns();
      });
    }"""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in wrong]
    assert page.evaluate(read, texts) == [[]] * len(wrong)
    assert page.evaluate(read, [json.dumps([user, answer])]) == [[user, answer]]
    page.evaluate("() => { localStorage.lockstep = '5'; onpagehide = () => { sessionStorage['lockstep.chat'] = '5' } }")
    page.reload()
    expect(page.locator("#state")).to_have_text("ready")
    assert page.locator(".turn").count() == 0


@pytest.mark.parametrize(("width", "height"), [(360, 640), (1280, 800)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_light_and_dark(page: Page, width: int, height: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    says(page, "word " * 80, "\n\n```\n" + "wide " * 80 + "\n```\n", "averyveryverylongword" * 30)
    ask(page, "x")
    expect(page.locator(".foot")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = page.locator("#prompt").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= height
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()


def test_a_model_that_is_not_there_yet_is_told_where_one_looks(page: Page) -> None:
    """What was written stays, and can be sent as soon as the model is there; another model shows its own name."""
    reason = "the model is being loaded: try again in a moment."
    page.route("**/ready", lambda route: route.fulfill(status=503, json={"reason": reason}))
    page.reload()
    expect(page.locator("#state")).to_have_text("not ready")
    ask(page, "the quick")
    expect(page.locator("#wait")).to_have_text(f"This cannot be sent yet: {reason}")
    expect(page.get_by_label("Message", exact=True)).to_have_value("the quick")
    page.unroute("**/ready")
    expect(page.locator("#wait")).to_be_hidden(timeout=4000)
    name = "org/" + "another-long-name" * 3
    models = {"object": "list", "data": [{"id": name}]}
    missing = {"error": {"message": "there is no model 'tiny'", "code": "model_not_found"}}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=404, json=missing))
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("There is no model 'tiny'")
    expect(page.get_by_label("Model", exact=True)).to_have_value(name)
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(0)
    page.set_viewport_size({"width": 360, "height": 640})
    boxes = [part.bounding_box() for part in page.locator("header select, #state, header button").all()]
    edges = [(box["x"], box["x"] + box["width"]) for box in boxes if box is not None]
    assert len(edges) == 4
    assert all(left[1] <= right[0] for left, right in pairwise(edges))
    assert edges[-1][1] <= 360


def test_a_server_with_a_key_asks_for_it(browser: Browser) -> None:
    with server(api_key="secret") as (url, process):
        page = browser.new_page()
        page.set_default_timeout(20_000)
        page.goto(url)
        expect(page.locator("#state")).to_have_text("needs an API key")
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").press("Tab")
        expect(page.locator("#state")).to_have_text("ready")
        page.get_by_label("Most tokens").fill("4")
        ask(page, "the")
        expect(page.locator(".foot")).to_contain_text("token")
        process.send_signal(signal.SIGTERM)
        expect(page.locator("#state")).to_have_text("not reachable")
        page.close()


def test_the_files_say_what_they_may_do(url: str) -> None:
    for path, kind in (("/", "text/html"), ("/web/page.js", "text/javascript"), ("/web/page.css", "text/css")):
        answer = httpx.get(f"{url}{path}")
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", answer.text).replace("https?:", "")
    assert httpx.get(f"{url}/web/..%2fapp.py").status_code == 404
    assert httpx.get(f"{url}/web/none.js").status_code == 404
