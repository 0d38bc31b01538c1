#!/usr/bin/env bash
# Builds the site build/docs from README.md, docs/, onehop.h and the Python package; a warning is an error. Needs
# doxygen, and Sphinx with its extensions in build/venv (`tools/bootstrap.sh docs`); no network.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf build/docs build/docs-xml
mkdir -p build/docs
doxygen docs/site/Doxyfile
build/venv/bin/python -m sphinx -q -W --keep-going -b html -c docs/site -d build/docs-trees . build/docs
python3 docs/site/check_site.py build/docs build/docs-xml/xml
echo '<meta http-equiv="refresh" content="0; url=docs/site/index.html">' >build/docs/index.html
echo "docs: build/docs/index.html"
