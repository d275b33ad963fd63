.PHONY: run test lock

run:
	@./run generate

test:
	@./run test

# Refresh the lock; add --upgrade to move to newer versions.
lock:
	uv pip compile --universal --python-version 3.11 --all-extras --no-annotate pyproject.toml -o requirements.lock
