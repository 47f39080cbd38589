/* Sorts a table by the column whose title is clicked, and copies the summary. The page is whole without it. */
(function () {
  "use strict";
  function value(row, at) {
    var text = row.cells[at] ? row.cells[at].textContent.trim() : "";
    var found = text.replace(/\u2212/g, "-").replace(/,/g, "").match(/^[+\u00b1<]?(-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)\s*(kB|MB|GB|B)?/i);
    var units = { b: 1, kb: 1e3, mb: 1e6, gb: 1e9 };
    return found ? parseFloat(found[1]) * (units[(found[2] || "b").toLowerCase()] || 1) : text.toLowerCase();
  }
  function compare(a, b) {
    if (typeof a === typeof b) { return a < b ? -1 : a > b ? 1 : 0; }
    return typeof a === "number" ? -1 : 1;
  }
  document.querySelectorAll("table.sortable").forEach(function (table) {
    table.querySelectorAll("thead th").forEach(function (title, at) {
      var button = document.createElement("button");
      button.type = "button";
      button.title = "sort by this column";
      while (title.firstChild) { button.appendChild(title.firstChild); }
      title.appendChild(button);
      button.addEventListener("click", function () {
        var down = title.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("thead th").forEach(function (other) { other.removeAttribute("aria-sort"); });
        title.setAttribute("aria-sort", down ? "descending" : "ascending");
        Array.prototype.forEach.call(table.tBodies, function (body) {
          var rows = Array.prototype.filter.call(body.rows, function (row) { return row.cells[0].scope !== "rowgroup"; });
          rows.map(function (row, i) { return { row: row, key: value(row, at), place: i }; })
            .sort(function (a, b) { return (down ? -1 : 1) * compare(a.key, b.key) || a.place - b.place; })
            .forEach(function (item) { body.appendChild(item.row); });
        });
      });
    });
  });
  var copy = document.getElementById("copy"), text = document.getElementById("summary-text");
  if (copy && text) {
    copy.hidden = false;
    copy.addEventListener("click", function () {
      function done() { copy.textContent = "Copied"; }
      function select() {
        text.parentElement.open = true;
        var range = document.createRange();
        range.selectNodeContents(text);
        var chosen = window.getSelection();
        chosen.removeAllRanges();
        chosen.addRange(range);
        try { if (document.execCommand("copy")) { done(); } } catch (error) { copy.textContent = "Press Ctrl+C"; }
      }
      if (navigator.clipboard && window.isSecureContext) { navigator.clipboard.writeText(text.textContent).then(done, select); }
      else { select(); }
    });
  }
})();
