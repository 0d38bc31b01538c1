# Front door. What is missing is installed first (tools/bootstrap.sh says what); the rest is CMake.

help:
	@echo "make demo        build library, command and examples, run the row_parallel example and a timed,"
	@echo "                 verified all-reduce; GPU kernels for the GPUs of this machine"
	@echo "make test        build all, with nvcc for all GPUs; all tests that need no GPU, checks of the tree and the kernels"
	@echo "make test TORCH=1  the same, and PyTorch is installed for the tests that need it"
	@echo "make mutants     every altered protocol must be noticed; make test takes a sample"
	@echo "make sweep       a fault at every call of the system, in every rank; make test takes a sample"
	@echo "make asan, tsan  the quick tests under AddressSanitizer or ThreadSanitizer"
	@echo "make test-gpu    tests that need GPUs"
	@echo "make format      reformat the C sources; format-check only looks"
	@echo "make docs        the site build/docs: pages, C API, Python API; a warning is an error"
	@echo "make clean       remove build/, but for the tools installed in build/venv"

build:
	@tools/bootstrap.sh
	@tools/build.sh release

demo:
	@tools/bootstrap.sh
	@tools/build.sh demo
	build/release/examples/row_parallel
	build/release/onehop perf

test:
	@TORCH=$(TORCH) tools/test.sh release

asan tsan:
	@tools/test.sh $@

mutants:
	@tools/bootstrap.sh sanitize
	python3 tests/mutants/run.py

sweep: build
	ONEHOP_SOURCE_DIR=$(CURDIR) build/release/tests/sweep/sweep --jobs $(or $(JOBS),$(shell expr 2 '*' `nproc`))

test-gpu: build
	@test -f tests/gpu/run.sh || { echo "tests/gpu/run.sh is missing: there are no GPU tests"; exit 1; }
	bash tests/gpu/run.sh

format format-check:
	@tools/bootstrap.sh format
	@find include src tests examples python -name '*.[ch]' -print0 | \
	    xargs -0 build/venv/bin/clang-format $(if $(filter format,$@),-i,--dry-run --Werror)

docs:
	@tools/bootstrap.sh docs
	@tools/docs.sh

clean:
	rm -rf build/release build/dev build/asan build/tsan build/docs build/docs-xml build/docs-trees

.PHONY: help build demo test mutants sweep asan tsan test-gpu format format-check docs clean
