"""The page in Chromium: every link, every control, both schemes, three widths, without a script and on paper."""

import base64
import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence_tests.learn.page.gallery import conversions
from scratch import masks, tiling

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[browser]'")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
DRIVER = shutil.which("chromedriver") or ""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="Chromium and chromedriver are not installed"),
]
WIDTHS = (390, 1280, 2560)
SCHEMES = ("light", "dark")
PAPER = "rgb(241, 239, 233)"  # under code, in the light scheme


class Browser:
    """Chromium with the page open."""

    def __init__(self, file: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run"):
            options.add_argument(argument)
        options.add_argument("--disable-ipc-flooding-protection")  # every state of the switches is an address
        if os.name == "posix" and os.geteuid() == 0:  # as in a container
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.address = file.as_uri()

    def open(self, name: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#{name}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def run_later(self, script: str) -> Any:
        self.driver.set_script_timeout(300)
        return self.driver.execute_async_script(f"const done = arguments[0]; {script}")

    def set(self, width: int = 1280, scheme: str = "light", **media: str) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = {"prefers-color-scheme": scheme, **{name.replace("_", "-"): value for name, value in media.items()}}
        given = {"features": [{"name": name, "value": value} for name, value in features.items()]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", given)

    def press(self, key: str, count: int = 1) -> None:
        for _ in range(count):
            for kind in ("rawKeyDown", "keyUp"):
                event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
                self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", event)

    def complaints(self) -> list[Any]:
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]


KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
IN_SIGHT = "const seen = x => x.getClientRects().length > 0 && x.getBoundingClientRect().height > 0;"


@pytest.fixture(scope="module")
def browser(page_file: Path) -> Iterator[Browser]:
    found = Browser(page_file)
    yield found
    found.driver.quit()


@pytest.fixture(autouse=True)
def no_complaint(browser: Browser) -> Iterator[None]:
    browser.set()
    browser.complaints()
    yield
    assert browser.complaints() == []
    assert browser.run("return performance.getEntriesByType('resource').map(x => x.name)") == []


def test_every_link_brings_its_target_into_sight(browser: Browser) -> None:
    browser.open()
    lost = browser.run_later(f"""{IN_SIGHT}
        const names = [...new Set([...document.links].map(x => x.hash.slice(1)).filter(x => x))], lost = [];
        (async () => {{
            for (const name of names) {{
                location.hash = name;
                await new Promise(next => setTimeout(next, 5));
                const target = document.getElementById(name);
                if (!target || !seen(target) || document.querySelectorAll('.part.at').length !== 1) lost.push(name);
            }}
            done([names.length, lost]);
        }})();""")
    assert lost[0] > 200
    assert lost[1] == []


def test_going_somewhere_moves_the_focus_there_and_marks_the_way(browser: Browser) -> None:
    browser.open()
    browser.run("document.querySelector('.bar a[href=\"#masks\"]').click()")
    browser.run_later("setTimeout(done, 50)")
    assert browser.run("return document.activeElement.id") == "masks"
    current = browser.run("return [...document.querySelectorAll('.bar [aria-current]')].map(x => x.hash)")
    assert current == ["#masks"]
    browser.driver.back()
    browser.run_later("setTimeout(done, 50)")
    assert browser.run("return document.querySelector('.part.at').id") == "home"


# Click every switch alone, and beside every other; list what does not show the state that it should.
EVERY_PAIR = """
    const wait = () => new Promise(next => setTimeout(next, 5)), problems = [], seenKeys = [];
    (async () => {
        for (const board of document.querySelectorAll('.board')) {
            location.hash = board.id; await wait();
            const states = [...board.querySelectorAll('.state:not(.live)')].map(x => x.dataset.key);
            const now = () => [...board.querySelectorAll('.state')].filter(seen);
            for (const input of board.querySelectorAll('input:not([value="0"])')) {
                board.querySelector('[type=reset]').click(); await wait();
                input.click(); await wait();
                const name = input.closest('fieldset').dataset.argument, key = `${name}.${input.value}`;
                if (String(now().map(x => x.dataset.key)) !== key || now()[0].matches('.live')) problems.push([key, now().length]);
                seenKeys.push(key);
                if (![...board.querySelectorAll('.told')].filter(seen).length && name !== 'mode') problems.push(['not explained', key]);
                for (const other of board.querySelectorAll('input:not([value="0"])')) {
                    if (other.name === input.name || !(input.compareDocumentPosition(other) & 4)) continue;  // each pair once
                    other.click(); await wait();
                    const second = `${other.closest('fieldset').dataset.argument}.${other.value}`, state = now()[0];
                    const wanted = [`${key}-${second}`, `${second}-${key}`];
                    if (now().length !== 1 || !wanted.includes(state.dataset.key)) problems.push([key, second]);
                    else if (state.matches('.live') === wanted.some(x => states.includes(x))) problems.push(['live', key, second]);
                    else if (!state.querySelector('pre').textContent.includes('\\n')) problems.push(['no code', key, second]);
                    else if (!seen(state.querySelector('table, strong, .shape') || document.head)) problems.push(['no result', key, second]);
                    seenKeys.push(state.dataset.key);
                    board.querySelector(`input[name="${other.name}"][value="0"]`).click(); await wait();
                }
            }
            const missed = states.filter(x => x !== 'defaults' && !seenKeys.includes(x));
            if (missed.length) problems.push(['never shown', missed]);
        }
        done(problems);
    })();"""


def test_every_switch_shows_its_state_and_combines_with_every_other(browser: Browser) -> None:
    browser.open("switches")
    assert browser.run_later(IN_SIGHT + EVERY_PAIR) == []


@pytest.mark.parametrize("key", ["add_zero_attn.1-attn_mask.2", "num_heads.2-bias.1-add_zero_attn.1-attn_mask.3"])
def test_a_state_that_is_linked_to_sets_its_switches(key: str, browser: Browser) -> None:
    browser.open(f"switches-mha-{key}")
    chosen = browser.run(
        "return [...document.querySelectorAll('#switches-mha input:checked')]"
        ".filter(x => x.value !== '0').map(x => `${x.name.slice(4)}.${x.value}`)"
    )
    assert "-".join(chosen) == key
    shown = browser.run(
        f"{IN_SIGHT} return [...document.querySelectorAll('.state')].filter(seen).map(x => x.dataset.key)"
    )
    assert shown == [key]


def test_what_is_computed_here_is_what_torch_gave(browser: Browser) -> None:
    """Each state that torch was run with, computed again by the page's script and printed."""
    browser.open("switches")
    apart = browser.run("""
        const texts = within => [...within.querySelectorAll('table')].map(x => [...x.querySelectorAll('caption, th, td')].map(y => y.textContent.trim() + y.className));
        const problems = []; let count = 0;
        for (const board of document.querySelectorAll('.board')) for (const state of board.querySelectorAll('.state[data-key]:not(.live)')) {
            const key = state.dataset.key;
            const chosen = key === 'defaults' ? {} : Object.fromEntries(key.split('-').map(x => x.split('.').map((y, i) => i ? Number(y) : y)));
            if (['dtype', 'dropout', 'dropout_p', 'device'].some(x => chosen[x]) || state.querySelector('.shape')?.textContent.includes('of torch.nn')) continue;
            const mine = document.createElement('div');
            mine.append(...computed(board.dataset.board, chosen));
            count += 1;
            if (String(texts(mine)) !== String(texts(state))) problems.push([key, texts(mine), texts(state)]);
        }
        return [count, problems];""")
    assert apart[0] > 90
    assert apart[1] == []


def test_a_score_lights_its_row_its_column_and_its_sum(browser: Browser) -> None:
    browser.open("steps-attention-4")
    lit = browser.run("""
        const step = document.getElementById('steps-attention-4');
        const cell = step.querySelectorAll('table')[1].tBodies[0].rows[2].cells[4];  // head 1, query 2, key 3
        cell.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
        const rects = name => [...step.querySelectorAll(`.operands [data-t=${name}][data-i="1"] rect`)].map(x => x.classList.contains('lit'));
        return [rects('q'), rects('k'), step.querySelectorAll('td.here').length, step.querySelector('.sum').textContent,
                cell.textContent, step.querySelectorAll('[data-i="0"] rect.lit').length,
                [...step.querySelectorAll('th.lit')].map(x => x.textContent.trim())];""")
    q, k, here, text, number, others, heads = lit
    assert sorted(heads) == ["2", "2", "3", "3"]
    assert q == [False] * 8 + [True] * 4
    assert k == [False] * 12 + [True] * 4 + [False] * 4
    assert here == 2  # in both implementations
    assert text.startswith("scores[head 1, query 2, key 3] = (")
    assert text.endswith(f"= {number}")
    assert others == 0


def test_every_step_follows_what_is_changed(browser: Browser) -> None:
    """A number, a place of the mask and the number of heads; the reset brings back what torch gave."""
    browser.open("steps-attention")
    now = "const shown = () => [...document.querySelectorAll('#steps-attention .step td')].map(x => x.textContent.trim());"
    before, changed, code, reset = browser.run(f"""{now}
        const before = shown(), bench = document.querySelector('.bench'), cell = bench.querySelector('td');
        cell.textContent = '−3.5'; cell.dispatchEvent(new Event('blur'));
        bench.querySelector('[data-at="2 0"]').click();
        const heads = bench.querySelector('select');
        heads.value = '4'; heads.dispatchEvent(new Event('input'));
        const changed = [...document.querySelectorAll('#steps-attention-6 .side:last-child tbody tr:nth-child(3) td:nth-child(2)')].map(x => x.textContent);
        const code = document.querySelector('#steps-attention .call').textContent;
        [...bench.querySelectorAll('button')].at(-1).click();
        return [before, changed, code, shown()];""")
    assert changed == ["0.000"] * 4
    assert "nn.MultiheadAttention(8, 4, batch_first=True)" in code
    assert "[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]" in code
    assert reset == before


def test_every_stage_of_the_layer_follows_its_switches(browser: Browser) -> None:
    browser.set(width=390)
    browser.open("steps-layer")
    before, titles, code, text, width, reset = browser.run("""
        const view = document.getElementById('steps-layer');
        const shown = () => [...view.querySelectorAll('.step td')].map(x => x.textContent);
        const before = shown();
        for (const [name, value] of [['isDecoder', 1], ['normFirst', 1], ['activation', 1]]) {
            const chosen = view.querySelector(`[name=${name}]`);
            chosen.selectedIndex = value; chosen.dispatchEvent(new Event('input'));
        }
        view.querySelector('[data-at="0 2"]').click();
        const cell = view.querySelector('.bench td');
        cell.textContent = '−3.5'; cell.dispatchEvent(new Event('blur'));
        view.querySelector('.step td').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
        const titles = [...view.querySelectorAll('h4')].map(x => x.textContent), text = view.querySelector('.sum').textContent;
        const code = view.querySelector('.call').textContent, width = document.documentElement.scrollWidth;
        view.querySelector('.bench button').click();
        return [before, titles, code, text, width, shown()];""")
    assert titles[:4] == ["norm1", "weights of self_attn", "self_attn", "residual1"]
    assert titles[-3:] == ["gelu", "linear2", "residual3"]
    assert (
        'nn.TransformerDecoderLayer(8, 2, 7, dropout=0.0, batch_first=True, activation="gelu", norm_first=True)' in code
    )
    assert "[[1, 0, 1], [1, 1, 0], [1, 1, 1]]" in code
    assert text.startswith("norm1[token 0, feature 0] = (−3.500 − mean")
    assert width == 390
    assert reset == before


def test_masks_are_drawn_with_the_mouse(browser: Browser) -> None:
    browser.open("masks-converter")
    before = typed(browser)
    corners = browser.run("""return ['0 0', '0 2'].map(x => document.querySelector(`.converter [data-at="${x}"]`).getBoundingClientRect())
        .map(x => [x.x + x.width / 2, x.y + x.height / 2]);""")
    (x0, y0), (x1, y1) = corners
    for kind, x, y in (
        ("mousePressed", x0, y0),
        ("mouseMoved", (x0 + x1) / 2, y0),
        ("mouseMoved", x1, y1),
        ("mouseReleased", x1, y1),
    ):
        event = {
            "type": kind,
            "x": x,
            "y": y,
            "button": "left",
            "buttons": 0 if kind == "mouseReleased" else 1,
            "clickCount": 1,
        }
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
    before[0, :3] = ~before[0, 0]
    assert torch.equal(typed(browser), before)


def test_tables_are_walked_by_arrow_keys(browser: Browser) -> None:
    browser.open("steps-attention-6")
    browser.run("document.querySelector('#steps-attention-6 table [tabindex=\"0\"]').focus()")
    browser.press("ArrowRight", 2)
    browser.press("ArrowDown")
    browser.press("ArrowLeft")
    at = browser.run("const x = document.activeElement; return [x.parentElement.sectionRowIndex, x.cellIndex - 1]")
    assert at == [1, 1]
    assert browser.run("return document.querySelector('#steps-attention-6 .sum').textContent").startswith(
        "weights[head 0"
    )
    browser.press("ArrowUp", 9)
    browser.press("ArrowLeft", 9)
    assert browser.run(
        "const x = document.activeElement; return [x.parentElement.sectionRowIndex, x.cellIndex - 1]"
    ) == [0, 0]
    stops = browser.run(
        "return [...document.querySelectorAll('#steps-attention-6 table')].map(x => x.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert set(stops) == {1}


def converted(browser: Browser) -> dict[str, str]:
    return browser.run(
        "return Object.fromEntries([...document.querySelectorAll('[data-form]')].map(x => [x.dataset.form, x.textContent]))"
    )


def typed(browser: Browser) -> torch.Tensor:
    code = browser.run("return document.querySelector('.typed').textContent")
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    return names["may_attend"]


def test_the_converter_says_what_torch_says(browser: Browser) -> None:
    browser.open("masks-converter")
    expected = masks.causal(3, 5, align="lower_right")
    for i, j in ((0, 0), (2, 4), (1, 3), (0, 4)):
        browser.run("document.querySelector(`.converter [data-at='${arguments[0]} ${arguments[1]}']`).click()", i, j)
        expected[i, j] = ~expected[i, j]
        assert torch.equal(typed(browser), expected)
        assert converted(browser) == conversions(expected)
    count = browser.run("return document.querySelectorAll('.load').length")
    for number in range(count):
        cells = browser.run(
            "const x = document.querySelectorAll('.load')[arguments[0]]; x.click(); return x.dataset.mask", number
        )
        expected = torch.tensor([[bit == "1" for bit in row] for row in cells.split()])
        assert torch.equal(typed(browser), expected)
        assert converted(browser) == conversions(expected)


def test_the_mask_is_edited_by_keyboard(browser: Browser) -> None:
    browser.open("masks-converter")
    browser.run("document.querySelector('.converter .editor button').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    assert browser.run("return document.activeElement.getAttribute('aria-label')") == "query 1, key 1"


def test_traps_are_found_by_words_and_severity(browser: Browser) -> None:
    browser.open("traps")
    shown = f"{IN_SIGHT} return [...document.querySelectorAll('.trap')].filter(seen).map(x => x.id)"
    everything = browser.run(shown)
    find = """const x = document.getElementById('trap-search'); x.value = arguments[0];
              x.dispatchEvent(new Event('input', { bubbles: true }))"""
    browser.run(find, "sdpa causal")
    some = browser.run(shown)
    assert "trap-sdpa_top_left" in some
    assert len(some) < len(everything)
    assert browser.run("return document.getElementById('trap-count').textContent") == f"{len(some)} traps"
    browser.run(find, "no such words")
    assert browser.run(shown) == []
    browser.run(find, "")
    browser.run("document.querySelectorAll('[name=severity]').forEach(x => { if (x.value !== 'slow') x.click(); })")
    slow = browser.run(
        f"{IN_SIGHT} return [...document.querySelectorAll('.trap')].filter(seen).map(x => x.dataset.severity)"
    )
    assert slow
    assert set(slow) == {"slow"}


def test_a_trap_that_is_linked_to_is_open(browser: Browser) -> None:
    browser.open("trap-mask_polarity")
    assert browser.run("return document.getElementById('trap-mask_polarity').open")
    assert not browser.run("return document.getElementById('trap-fully_masked_row').open")


def test_guesses_are_answered_with_hints_and_points(browser: Browser) -> None:
    browser.open("mistakes-3")
    said = browser.run("""
        const exercise = document.getElementById('mistakes-3'), said = [];
        const guess = x => { x.click(); said.push(exercise.querySelector('.verdict').textContent); };
        const [first, second] = exercise.querySelectorAll('li:not([data-guilty]) button');
        guess(first); guess(second); guess(exercise.querySelector('[data-guilty] button')); guess(exercise.querySelector('li button'));
        return [...said, document.getElementById('score').textContent, document.querySelectorAll('.tabs .done').length];""")
    assert said[:2] == [
        "No, this line is right. The weights are wrong: the mistake is in them, or before them.",
        "No, this line is right. It is in the method future.",
    ]
    assert said[2:] == [*["Yes, this is the line. Found with 3 guesses: 1 of 3 points."] * 2, "Score: 1 of 36", 1]


def test_every_measurement_has_its_answer(browser: Browser) -> None:
    browser.open("speed")
    problems = browser.run_later(f"""{IN_SIGHT}
        const problems = [], what = document.getElementById('speed-what'), length = document.getElementById('speed-length');
        const choose = async (list, value) => {{ list.value = value; list.dispatchEvent(new Event('input', {{ bubbles: true }})); await new Promise(next => setTimeout(next, 5)); }};
        (async () => {{
            for (const option of what.options) {{
                await choose(what, option.value);
                const chart = [...document.querySelectorAll('#speed .panel')].filter(seen);
                if (chart.length !== 1 || chart[0].id !== option.value) problems.push([option.value, chart.length]);
                if (chart[0].id === 'speed-others') continue;
                for (const one of [...length.options]) {{
                    await choose(length, one.value);
                    const answers = [...chart[0].querySelectorAll('.answer')].filter(seen).map(x => x.dataset.length);
                    if (String(answers) !== one.value) problems.push([option.value, one.value, answers]);
                }}
            }}
            done([what.options.length, problems]);
        }})();""")
    assert problems[0] > 5
    assert problems[1] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_is_smaller_than_12_pixels(width: int, browser: Browser) -> None:
    browser.set(width)
    browser.open()
    small = browser.run("""
        document.querySelectorAll('.part, .panel, .told').forEach(x => x.classList.add('at'));
        document.querySelectorAll('details').forEach(x => { x.open = true; });
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), small = {};
        for (let node = walker.nextNode(); node; node = walker.nextNode()) {
            const x = node.parentElement;
            if (!node.textContent.trim() || !x.getClientRects().length || x.closest('sub, sup, title')) continue;
            const scale = x.ownerSVGElement ? x.getScreenCTM().a : 1, size = parseFloat(getComputedStyle(x).fontSize) * scale;
            if (size < 11.9) small[`${x.tagName}.${x.className.baseVal ?? x.className} in ${x.closest('.part')?.id}`] = size;
        }
        return small;""")
    assert small == {}


def test_the_way_is_whole_on_a_phone(browser: Browser) -> None:
    browser.set(390)
    browser.open("masks")
    cut = browser.run("""return [...document.querySelectorAll('.bar a')].map(x => x.getBoundingClientRect())
        .filter(x => x.left < 0 || x.right > innerWidth).length;""")
    assert cut == 0
    above = browser.run("""location.hash = 'mistakes-1'; return new Promise(done => setTimeout(() => {
        const top = x => document.querySelector(`#mistakes-1 ${x}`).getBoundingClientRect().top;
        done(top('.lines') < top('.tables')); }, 50));""")
    assert above


def test_a_file_opens_at_its_class(browser: Browser) -> None:
    browser.open("code")
    at = browser.run_later("""
        document.querySelector('#code .tabs a[href="#code-attention-MultiheadAttention"]').click();
        setTimeout(() => done([document.getElementById('code-attention-MultiheadAttention').getBoundingClientRect().top,
            [...document.querySelectorAll('#code .tabs [aria-current]')].map(x => x.textContent)]), 900);""")
    assert 0 <= at[0] < 200
    assert at[1] == ["attention.py"]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(width: int, browser: Browser) -> None:
    browser.set(width)
    browser.open()
    wide = browser.run_later("""
        const names = [...document.querySelectorAll('.part, .panel')].map(x => x.id), wide = [];
        (async () => {
            for (const name of names) {
                location.hash = name;
                await new Promise(next => setTimeout(next, 5));
                document.querySelectorAll('.part.at details').forEach(x => { x.open = true; });
                if (document.documentElement.scrollWidth > innerWidth) wide.push(name);
            }
            done(wide);
        })();""")
    assert wide == []


CONTRAST = """
    const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 });
    const context = canvas.getContext('2d', { willReadFrequently: true });
    const parse = text => {
        context.clearRect(0, 0, 1, 1); context.fillStyle = text; context.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map(c => c / 255).map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
        return .2126 * x + .7152 * y + .0722 * z;
    };
    const behind = x => {
        for (let at = x; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour[3] > .5) return colour;
        }
        return [255, 255, 255];
    };
    const contrast = x => {
        const [a, b] = [light(parse(getComputedStyle(x).color)), light(behind(x))].sort((p, q) => q - p);
        return (a + .05) / (b + .05);
    };
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_from_its_ground(scheme: str, browser: Browser) -> None:
    browser.set(scheme=scheme)
    browser.open("steps")
    weak = browser.run(
        CONTRAST
        + """
        const kinds = ['z', ...[1, 2, 3, 4, 5, 6, 7, 8].flatMap(x => [`p${x}`, `n${x}`])];
        const table = document.querySelector('table.heat tbody'), row = table.insertRow();
        const cells = kinds.map(kind => Object.assign(row.insertCell(), { className: kind, textContent: '0.5' }));
        const weak = cells.filter(x => contrast(x) < 4.5).map(x => [x.className, contrast(x)]);
        row.remove();
        document.querySelectorAll('.part').forEach(x => x.classList.add('at'));
        document.querySelectorAll('details').forEach(x => { x.open = true; });
        const texts = [...document.querySelectorAll('p, li, h1, h2, h3, h4, a, b, i, u, code, figcaption, caption, th, label, button, summary, dt, dd')];
        for (const x of texts) {
            if (!x.getClientRects().length || x.closest('.spare, svg') || !x.textContent.trim()) continue;
            if (x.querySelector('input:disabled') || x.closest('label')?.querySelector('input:disabled')) continue;
            if (contrast(x) < 4.5) weak.push([x.tagName, x.className, x.textContent.slice(0, 30), contrast(x)]);
        }
        return weak.slice(0, 9);"""
    )
    assert weak == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_two_hues_are_told_apart_whatever_eyes_see_them(scheme: str, browser: Browser) -> None:
    """In the colours that people with the three kinds of colour blindness see, by the distance of the strongest."""
    browser.set(scheme=scheme)
    browser.open("steps")
    for kind in ("protanopia", "deuteranopia", "tritanopia", "achromatopsia"):
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedVisionDeficiency", {"type": kind})
        picture = browser.run("""
            document.body.innerHTML = '<table class=heat style="font-size:40px"><tr><td class=p8>&nbsp;<td class=n8>&nbsp;</table>';
            return [...document.querySelectorAll('td')].map(x => { const r = x.getBoundingClientRect(); return [r.x + 9, r.y + 9]; });""")
        first, second = (pixel(browser, x, y) for x, y in picture)
        apart = sum(abs(a - b) for a, b in zip(first, second, strict=True))
        # Whoever sees no colour at all has the minus sign; everybody else sees the hue.
        assert apart > (0 if kind == "achromatopsia" else 60), (kind, first, second)
        browser.open("steps")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedVisionDeficiency", {"type": "none"})


def pixel(browser: Browser, x: float, y: float) -> tuple[int, int, int]:
    from matplotlib import image  # it reads PNG, and is there for the plots

    clip = {"x": x, "y": y, "width": 2, "height": 2, "scale": 1}
    shot = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    import io

    pixels = image.imread(io.BytesIO(base64.b64decode(shot["data"])))
    red, green, blue = (round(float(c) * 255) for c in pixels[0, 0, :3])
    return red, green, blue


def test_code_keeps_its_empty_lines(browser: Browser) -> None:
    browser.open("code-tiling")
    first = browser.run("""return [...document.querySelectorAll('#code-tiling-begin .halves > :first-child')]
        .filter(x => x.tagName === 'PRE').map(x => x.innerText).join('');""")
    source = Path(inspect.getfile(tiling)).read_text(encoding="utf-8")
    assert "\n\n" in first.strip()
    assert first.strip() == source.partition('"tiled_attention"]')[2].partition("\n\n\ndef ")[0].strip()


def test_nothing_moves_for_those_who_ask_for_that(browser: Browser) -> None:
    browser.set(prefers_reduced_motion="reduce")
    browser.open("steps")
    moving = browser.run("""return [getComputedStyle(document.documentElement).scrollBehavior,
        ...[...document.querySelectorAll('td, rect')].slice(0, 99).map(x => getComputedStyle(x).transitionDuration)]""")
    assert set(moving) == {"auto", "0s"}


def test_it_reads_without_a_script(browser: Browser, html: str, tmp_path: Path) -> None:
    file = tmp_path / "plain.html"
    file.write_text(
        re.sub(r"<script(?! type=\"application/json\").*?</script>", "", html, flags=re.DOTALL), encoding="utf-8"
    )
    browser.driver.get(file.as_uri())
    unseen = browser.run(f"""{IN_SIGHT}
        return [...document.querySelectorAll('.part, .panel, .step, .state, .answer, table')]
            .filter(x => !seen(x) && !x.closest('details')).map(x => x.id || x.outerHTML.slice(0, 80))""")
    assert unseen == []
    assert browser.run(f"{IN_SIGHT} return [...document.querySelectorAll('.only-js')].filter(seen).length") == 0


def test_it_prints(browser: Browser) -> None:
    browser.open("traps")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("return [...document.querySelectorAll('.trap')].every(x => x.open)")
    paper = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(paper["data"]).startswith(b"%PDF")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert browser.run("return getComputedStyle(document.querySelector('.trap pre')).backgroundColor") == PAPER
    assert browser.run("return getComputedStyle(document.querySelector('.bar')).display") == "none"
    assert browser.run(f"{IN_SIGHT} return [...document.querySelectorAll('input, button')].filter(seen).length") == 0
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_a_screen_reader_finds_names_and_order(browser: Browser) -> None:
    browser.open("steps")
    problems = browser.run("""
        const problems = [], levels = [...document.querySelectorAll('h1, h2, h3, h4')].map(x => Number(x.tagName[1]));
        levels.forEach((x, i) => { if (i && x > levels[i - 1] + 1) problems.push(['heading', i, x]); });
        document.querySelectorAll('section').forEach(x => {
            const by = x.getAttribute('aria-labelledby');
            if (!x.getAttribute('aria-label') && !(by && document.getElementById(by))) problems.push(['section', x.id || x.className]);
        });
        document.querySelectorAll('svg[role=img]').forEach(x => { if (!x.getAttribute('aria-label')) problems.push(['svg', x.outerHTML.slice(0, 60)]); });
        document.querySelectorAll('input').forEach(x => { if (!x.closest('label')) problems.push(['input', x.name]); });
        document.querySelectorAll('button, a').forEach(x => { if (!x.textContent.trim() && !x.getAttribute('aria-label')) problems.push(['name', x.outerHTML.slice(0, 60)]); });
        document.querySelectorAll('fieldset').forEach(x => { if (!x.querySelector('legend')) problems.push(['fieldset']); });
        return [problems, document.documentElement.lang, document.querySelectorAll('h1').length];""")
    assert problems == [[], "en", 1]


def test_it_opens_without_moving_what_is_there(browser: Browser) -> None:
    """The time that it takes is printed (pytest -s), and nothing is asked of it."""
    browser.open()
    shift, opened = browser.run_later("""
        let shift = 0;
        new PerformanceObserver(list => list.getEntries().forEach(x => { shift += x.value; }))
            .observe({ type: 'layout-shift', buffered: true });
        setTimeout(() => done([shift, performance.getEntriesByType('navigation')[0].loadEventEnd]), 300);""")
    print(json.dumps({"layout_shift": shift, "opened_ms": opened}))
    assert shift < 0.01
