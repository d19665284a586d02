"""Sphinx builds docs/ into a site: `scripts/nightly docs --site` writes it to .berth/site; warnings are errors."""

project = "berth"
author = "berth maintainers"
copyright = "2026, berth maintainers"  # noqa: A001  (Sphinx's name)

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
# The derived pages hold code of other tools that no lexer knows.
suppress_warnings = ["misc.highlighting_failure"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "berth"
html_static_path: list[str] = []
# The page draws diagrams with a script of the reader's choice; nothing is fetched while the site is built.
mermaid_output_format = "raw"
