"""The documentation site: `make docs` writes it to build/docs. Pages are also read as they are, in the repository."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

project = "ccfa"
html_title = "ccfa"
author = copyright = "the authors of ccfa"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "directives"]
exclude_patterns = ["_site"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

smartquotes = False  # options begin with two hyphens
default_role = "code"
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "inherited-members": False}
python_use_unqualified_type_names = True
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!ccfa\.\w+$).*")]  # what is not public, or of other packages, has no page here

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_sidebars = {"index": [], "start": []}
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
    "header_links_before_dropdown": 7,
}
