# SPDX-License-Identifier: Apache-2.0
# Releases: what .github/workflows/release.yml and publish.yml call, and what a person does by hand. docs/releasing.md
# says when.
#
#   VERSION     such as v0.1.0 (default: the version tag on what is checked out; release-commit, which comes before
#               the tag, has none)
#   CHECKS      of the evidence: lint tests matrix (default: all)
#   DIST        folder with the files (default: dist)
#   KEY         private key that sign-dist signs with; or its text in RELEASE_KEY. Without both the release says UNSIGNED.
#   PUBLIC_KEY  of the signer, for checks (default: docs/release_key.pub, where that is there)
#   UNSIGNED    1: take a release that says UNSIGNED too; no-key: only while there is no PUBLIC_KEY
#   AGAINST     folder with published files, for reproduce; without it there are two builds

ifeq ($(origin PUBLIC_KEY),undefined)
PUBLIC_KEY := $(wildcard docs/release_key.pub)
endif
VERSION ?=
CHECKS ?=
DIST ?= dist
KEY ?=
UNSIGNED ?=
AGAINST ?=

# A tag's name may be any text, and so may a path. Make takes what these hold as it stands, and the shell gets it from
# its environment: neither ever reads it as a program. Scripts say what a version may be.
$(foreach name,VERSION CHECKS DIST KEY PUBLIC_KEY UNSIGNED AGAINST,\
  $(eval override $(name) := $$(value $(name)))$(eval export $(name)))

RELEASE = PYTHONPATH="$(CURDIR)" "$(BIN)/python"
# No package is within reach of what runs so: -S leaves out what is installed.
STDLIB = PYTHONPATH="$(CURDIR)" "$(PYTHON)" -S
TRUST = $${PUBLIC_KEY:+--key="$$PUBLIC_KEY"} $(if $(filter 1 $(if $(PUBLIC_KEY),,no-key),$(UNSIGNED)),--allow-unsigned)

.PHONY: evidence dist sign-dist sign-keyless verify-dist try-dist reproduce release-agree release-commit release-notes \
  notes-file rehearsal draft-github fetch-draft publish-github pypi-files

evidence: $(READY) ## run lint, tests and matrix on a clean work tree, for make dist; CHECKS="lint tests matrix"
	@$(RELEASE) scripts/release_evidence.py --bin "$(BIN)" --workers "$(WORKERS)" -- $$CHECKS

dist: $(READY) ## build a release, if tag, version, changelog, matrix and evidence agree; VERSION=v0.1.0
	@$(RELEASE) scripts/release_dist.py --out="$$DIST" -- "$$VERSION"

verify-dist: $(READY) ## check signature, sums, manifest and provenance of DIST; PUBLIC_KEY=…, or UNSIGNED=1
	@$(RELEASE) -m megatron_fixes verify $(TRUST) -- "$$DIST"

reproduce: $(READY) ## build a release twice, or against published files, and name the first byte that differs; AGAINST=…
	@$(RELEASE) scripts/reproduce_release.py $${AGAINST:+--against="$$AGAINST"} -- "$$VERSION"

try-dist: $(READY) ## in an empty folder without network: verify DIST, apply its patches to a pristine release, prove
	@$(RELEASE) ci/try_release --offline $(TRUST) -- "$$DIST"

release-agree: $(READY) ## what make dist asks, but for the evidence; and that main has the commit
	@$(RELEASE) scripts/release_dist.py --only-agree -- "$$VERSION"

release-commit: $(READY) ## commit the version and the changelog's section; VERSION=v0.1.0
	@$(RELEASE) scripts/prepare_release.py -- "$$VERSION"

release-notes: $(READY) ## print the notes of a release; VERSION=v0.1.0
	@$(RELEASE) scripts/release_notes.py -- "$$VERSION"

# With a line that nobody has signed it, if DIST says so.
notes-file: $(READY)
	@$(RELEASE) scripts/release_notes.py --dist="$$DIST" --out=build/notes/notes.md -- "$$VERSION"

rehearsal: $(READY) ## make releases of throw-away clones, from tag to applied fixes
	@$(RELEASE) ci/release_rehearsal $(ARGS)

sign-dist: ## sign the sums of DIST with the key whose public half is committed; KEY=…
	@$(STDLIB) scripts/sign_release.py --out="$$DIST" $${KEY:+--key="$$KEY"}

# In GitHub Actions only: the identity is that of the workflow. It is verified before anybody relies on it.
sign-keyless: $(VENV)/sigstore/.ready
	@"$(VENV)/sigstore/bin/python" -m sigstore sign --bundle "$$DIST/SHA256SUMS.sigstore.json" "$$DIST/SHA256SUMS"
	@"$(VENV)/sigstore/bin/python" -m sigstore verify github --bundle "$$DIST/SHA256SUMS.sigstore.json" \
	  --cert-identity "$$GITHUB_SERVER_URL/$$GITHUB_WORKFLOW_REF" --repository "$$GITHUB_REPOSITORY" \
	  --ref "$$GITHUB_REF" --sha "$$GITHUB_SHA" "$$DIST/SHA256SUMS"

$(VENV)/sigstore/.ready: ci/sigstore.txt
	@$(or $(PYTHON),python3) -m venv $(VENV)/sigstore
	@$(VENV)/sigstore/bin/python -m pip install --quiet --disable-pip-version-check \
	  --require-hashes --only-binary=:all: --requirement ci/sigstore.txt
	@touch $@

draft-github:
	@$(STDLIB) scripts/publish_github.py --dist="$$DIST" -- draft "$$VERSION"

fetch-draft: ## download the files of a draft from GitHub into DIST; VERSION=v0.1.0
	@$(STDLIB) scripts/publish_github.py --dist="$$DIST" -- fetch "$$VERSION"

publish-github:
	@$(STDLIB) scripts/publish_github.py --dist="$$DIST" -- publish "$$VERSION"

# The package index takes wheel and source distribution, and nothing else.
pypi-files:
	@rm -rf build/pypi && mkdir -p build/pypi && cp -- "$$DIST"/megatron_fixes-*.whl "$$DIST"/megatron_fixes-*.tar.gz build/pypi
