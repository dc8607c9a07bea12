"""The playground in a real browser, over a mesh of real processes.

KVMESH_SCREENSHOT=path: with the real model, and the picture goes there.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from browser_kit import browser, wait
from kvmesh.cli.plan import MeshOptions
from kvmesh.rpc.credentials import hash_key
from mesh_kit import SCRIPTED, mesh_up, settled

PICTURE = os.environ.get("KVMESH_SCREENSHOT", "")
KEY, OTHER_KEY = "kvm-mine", "kvm-theirs"
PHASES = ["cache", "queue", "prefill", "transfer", "decode", "other"]
MOST_OTHER = 0.10
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> **not bold** &amp; \u202e'

# Counts the pieces in which text appears: an answer that streams comes in many.
COUNT_PIECES = """
window.pieces = 0;
new MutationObserver((records) => {
  for (const record of records) if (record.target.className === "text") window.pieces += record.addedNodes.length;
}).observe(document.getElementById("log"), { childList: true, subtree: true });
"""

# The gateway's answer is replaced by one that says everything with markup in it.
HOSTILE_FETCH = """
const text = arguments[0];
const chunk = (delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] })}\\n\\n`;
const call = { index: 0, id: text, type: "function", function: { name: text, arguments: text } };
const body = chunk({ reasoning_content: text }) + chunk({ content: text }) + chunk({ tool_calls: [call] })
  + `data: ${JSON.stringify({ error: { message: text, code: text } })}\\n\\n`;
const bytes = new TextEncoder().encode(body);
window.fetch = async () => new Response(new ReadableStream({
  start(controller) {
    for (const byte of bytes) controller.enqueue(new Uint8Array([byte]));
    controller.close();
  },
}));
"""


def options(tmp_path: Path) -> MeshOptions:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\nsha256 = "{hash_key(key)}"\ntenant = "{tenant}"\n'
            for key, tenant in ((KEY, "mine"), (OTHER_KEY, "theirs"))
        )
    )
    if PICTURE:
        mesh = MeshOptions(gateway_port=0, threads=1, settings={"gateway.route_timeout_ms": "10000"})
    else:
        # Slow steps: what an answer is spent on must not drown in what a busy machine adds.
        slow = {"prefill.scripted_step_ms": "40", "decode.scripted_step_ms": "40"}
        mesh = replace(SCRIPTED, settings={**SCRIPTED.settings, **slow})
    return replace(mesh, http_port=0, credentials_file=str(keys))


def by_id(driver: Any, name: str) -> Any:
    return driver.find_element("id", name)


def set_value(driver: Any, name: str, value: str) -> None:
    driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)


def ask(driver: Any, question: str) -> None:
    """Type and send by the keyboard alone."""
    field = by_id(driver, "question")
    field.clear()
    field.send_keys(question + "\n")


def last(driver: Any, selector: str) -> Any:
    found = driver.find_elements("css selector", f"article.assistant:last-of-type {selector}")
    return found[-1] if found else None


def use_the_page(driver: Any, url: str) -> dict[str, Any]:
    """Without a key, with one; an answer and its strip. Returns the strip as the page has it."""
    driver.get(url)
    # Without a key the gateway says no, and the page says so.
    wait(driver, lambda d: by_id(d, "error").is_displayed(), "the gateway's refusal")
    by_id(driver, "key").send_keys(KEY + "\t")
    wait(driver, lambda d: len(d.find_elements("css selector", "#model option")) > 1, "the list of models")
    wait(driver, lambda d: not by_id(d, "error").is_displayed(), "the refusal to go")
    assert driver.execute_script("return localStorage.length + sessionStorage.length + document.cookie.length") == 0
    driver.execute_script(COUNT_PIECES)
    set_value(driver, "max_tokens", "64" if PICTURE else "40")
    set_value(driver, "temperature", "0")
    question = "What is the capital of France?" if PICTURE else "tell me everything " * 8
    strip = ask_for_a_strip(driver, question)
    if PICTURE:
        # A second one, of a mesh whose links are made.
        set_value(driver, "max_tokens", "160")
        strip = ask_for_a_strip(driver, "What is it known for? Answer in two sentences.")
    assert last(driver, ".text").text
    assert driver.execute_script("return window.pieces") >= 5, "the answer did not stream"
    assert last(driver, ".note").text
    return strip


def ask_for_a_strip(driver: Any, question: str) -> dict[str, Any]:
    """An answer's strip as the page has it. On a machine that had better things to do meanwhile, spans come too late to
    be shown, or much time was nobody's: then of another answer, or one more."""
    for left in (2, 1, 0):
        before = last(driver, ".text")
        # Another question each time: the cache knows the answer to the first one.
        ask(driver, question + " more" * (2 - left))
        wait(driver, lambda d, before=before: (found := last(d, ".text")) and found != before, "the answer")
        wait(driver, lambda d: last(d, ".strip") or ((note := last(d, ".note")) and "spans" in note.text), "its end")
        strip = last(driver, ".strip")
        assert strip is not None or left, "no strip under three answers"
        if strip is None:
            continue
        items = strip.find_elements("css selector", "li")
        shown = {
            "total": float(strip.get_attribute("data-total")),
            "parts": {item.get_attribute("data-phase"): float(item.get_attribute("data-ms")) for item in items},
            "said": strip.text,
        }
        if "missing" not in shown["said"] and shown["parts"]["other"] <= MOST_OTHER * shown["total"]:
            break
    return shown


def stop_an_answer(driver: Any) -> None:
    set_value(driver, "max_tokens", "4000")
    ask(driver, "never end")
    wait(driver, lambda d: last(d, ".text"), "the first text")
    by_id(driver, "abort").click()
    wait(driver, lambda d: (note := last(d, ".note")) and note.text.startswith("stopped"), "the answer to be stopped")
    wait(driver, lambda d: by_id(d, "send").is_displayed(), "the page to be ready again")


def refuse_a_schema(driver: Any) -> None:
    set_value(driver, "schema", "{ not json")
    ask(driver, "x")
    wait(driver, lambda d: by_id(d, "error").text.startswith("JSON Schema"), "what is wrong with the schema")
    set_value(driver, "schema", "")


def show_hostile_text(driver: Any) -> None:
    driver.execute_script(HOSTILE_FETCH, HOSTILE)
    ask(driver, HOSTILE)
    wait(driver, lambda d: last(d, ".bad"), "the error of the hostile answer")
    for selector in (".reasoning", ".text", ".call", ".bad"):
        assert HOSTILE in last(driver, selector).get_property("textContent"), selector
    assert HOSTILE in driver.find_elements("css selector", "article.user .text")[-1].get_property("textContent")
    assert not driver.find_elements("css selector", "article img, article script, article b")
    assert driver.execute_script("return window.hacked") is None


def picture(driver: Any, path: Path) -> None:
    assert driver.save_screenshot(str(path))
    assert path.stat().st_size > 5_000
    if PICTURE:
        Path(PICTURE).write_bytes(path.read_bytes())


async def test_a_question_through_the_page(tmp_path: Path, record_property: Any) -> None:
    with browser(tmp_path / "profile") as driver:
        async with mesh_up(options(tmp_path)) as mesh:
            async with httpx.AsyncClient(base_url=mesh.state.http, timeout=60) as client:
                await headers_are_strict(client)
                strip = await asyncio.to_thread(use_the_page, driver, f"{mesh.state.http}/")
                await asyncio.to_thread(picture, driver, tmp_path / "playground.png")
                parts, total = strip["parts"], strip["total"]
                assert list(parts) == PHASES
                assert abs(sum(parts.values()) - total) < 1e-3
                assert parts["other"] <= MOST_OTHER * total, strip
                assert parts["decode"] > 0
                assert parts["prefill"] > 0
                record_property("measured", f"playground strip: {json.dumps(strip['parts'])} of {total:.1f} ms")
                await asyncio.to_thread(stop_an_answer, driver)
                await settled(mesh, "decode-0")
                await asyncio.to_thread(refuse_a_schema, driver)
                # Up to here every refusal was the gateway's: the page itself broke no rule of its own.
                log = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
                assert all("401" in line or "404" in line for line in log), log
                await asyncio.to_thread(show_hostile_text, driver)
                await a_trace_is_its_tenants_alone(client, mesh.model)


async def headers_are_strict(client: httpx.AsyncClient) -> None:
    for path in ("/", "/playground/app.js", "/playground/style.css"):
        response = await client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    page = (await client.get("/")).text
    assert "http://" not in page
    assert "https://" not in page
    assert "<script>" not in page
    for path in ("/playground/", "/playground/nothing.js", "/playground/..%2fpages.py", "/playground/index.html"):
        assert (await client.get(path)).status_code == 404, path


async def a_trace_is_its_tenants_alone(client: httpx.AsyncClient, model: str) -> None:
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = await client.post("/v1/chat/completions", json=body, headers=mine)
    assert answer.status_code == 200, answer.text
    path = f"/playground/trace/{answer.headers['x-request-id']}"
    async with asyncio.timeout(60):
        while (await client.get(path, headers=mine)).status_code != 200:
            await asyncio.sleep(0.1)
    assert (await client.get(path, headers=theirs)).status_code == 404
    assert (await client.get(path)).status_code == 401
