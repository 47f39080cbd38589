"""The page in a real browser, where one is installed: a click sorts, the summary can be copied, nothing is cut off."""

import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)

PROBE = """
<script>
var failures = [];
window.onerror = function (message) { failures.push(message); };
window.onload = function () {
  var table = document.querySelector("table.sortable"), at = 2;
  var button = table.querySelectorAll("thead th")[at].querySelector("button");
  function column() {
    return Array.from(table.tBodies[0].rows).filter(function (r) { return r.cells.length > 2; })
      .map(function (r) { return r.cells[at].textContent; }).join(",");
  }
  button.click(); var up = column(); button.click(); var down = column();
  var wide = document.documentElement.scrollWidth - window.innerWidth;
  var cut = Array.from(document.querySelectorAll(".tiles li, h1, h2, .headline"))
    .filter(function (e) { return e.scrollWidth > e.clientWidth + 1; }).length;
  var out = document.createElement("pre");
  out.id = "probe";
  out.textContent = [up, down, wide, cut, document.getElementById("copy").hidden, failures.join(";")].join("|");
  document.body.appendChild(out);
};
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("width", [1200, 390])
def test_in_a_browser(sample, tmp_path, width):
    page = (sample / "report.html").read_text(encoding="utf-8")
    file = tmp_path / "probe.html"
    file.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    options = ["--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", f"--window-size={width},900"]
    command = [BROWSER, "--headless", *options, "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-2000:]
    up, down, wide, cut, hidden, failures = found[1].split("|")
    times = [float(text) for text in up.split(",")]
    assert times == sorted(times) and len(times) == 3
    assert [float(text) for text in down.split(",")] == times[::-1]
    assert (int(wide) <= 0, cut, hidden, failures) == (True, "0", "false", "")
