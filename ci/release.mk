# SPDX-License-Identifier: Apache-2.0
# Releases: what .github/workflows/release.yml calls, and what a person does by hand. docs/releasing.md says when.
#
#   VERSION     such as v0.1.0 (default: the version tag on what is checked out)
#   CHECKS      of the evidence: lint tests matrix (default: all)
#   DIST        folder with the files (default: dist)
#   KEY         private key that signs; or its text in RELEASE_KEY. Without both the release says UNSIGNED.
#   PUBLIC_KEY  of the signer (default: docs/release_key.pub, where that is there)
#   AGAINST     folder with published files, for reproduce; without it there are two builds

VERSION ?=
CHECKS ?=
DIST ?= dist
KEY ?=
PUBLIC_KEY ?= $(wildcard docs/release_key.pub)
AGAINST ?=
SIGSTORE := sigstore==4.5.1
RELEASE = PYTHONPATH=$(CURDIR) $(BIN)/python
# A release that says UNSIGNED is checked but for the signature; one that is signed needs the key.
TRUST = $(if $(PUBLIC_KEY),--key $(PUBLIC_KEY),$$(grep -qs '^UNSIGNED' $(DIST)/SHA256SUMS.sig && echo --allow-unsigned))

.PHONY: evidence dist sign-dist sign-keyless verify-dist try-dist reproduce release-agree release-commit release-notes \
  rehearsal publish-github pypi-files

evidence: $(READY) ## run lint, tests and matrix on a clean work tree, for make dist; CHECKS="lint tests matrix"
	@$(RELEASE) scripts/release_evidence.py $(CHECKS) --bin $(BIN) --workers $(WORKERS)

dist: $(READY) ## build a release, if tag, version, changelog, matrix and evidence agree; VERSION=v0.1.0 KEY=…
	@$(RELEASE) scripts/release_dist.py $(VERSION) --out $(DIST) $(if $(KEY),--key $(KEY))

verify-dist: $(READY) ## check signature, sums, manifest and provenance of DIST; PUBLIC_KEY=…
	@$(RELEASE) -m megatron_fixes verify $(DIST) $(TRUST)

reproduce: $(READY) ## build a release twice, or against published files, and name the first byte that differs; AGAINST=…
	@$(RELEASE) scripts/reproduce_release.py $(VERSION) $(if $(AGAINST),--against $(AGAINST))

try-dist: $(READY) ## in an empty folder without network: verify DIST, apply its patches to a pristine release, prove
	@$(RELEASE) ci/try_release $(DIST) --offline $(if $(PUBLIC_KEY),--key $(PUBLIC_KEY))

release-agree: $(READY) ## what make dist asks, but for the evidence
	@$(RELEASE) scripts/release_dist.py $(VERSION) --only-agree

release-commit: $(READY) ## commit the version and the changelog's section; VERSION=v0.1.0
	@$(RELEASE) scripts/prepare_release.py $(VERSION)

release-notes: $(READY) ## print the notes of a release; VERSION=v0.1.0
	@$(RELEASE) scripts/release_notes.py $(VERSION)

rehearsal: $(READY) ## make releases of throw-away clones, from tag to applied fixes
	@$(RELEASE) ci/release_rehearsal $(ARGS)

sign-dist: $(READY)
	@$(RELEASE) scripts/release_dist.py --sign --out $(DIST) $(if $(KEY),--key $(KEY))

# In GitHub Actions only: the identity is that of the workflow. It is verified before anybody relies on it.
sign-keyless: $(VENV)/sigstore/.ready
	@$(VENV)/sigstore/bin/python -m sigstore sign --bundle $(DIST)/SHA256SUMS.sigstore.json $(DIST)/SHA256SUMS
	@$(VENV)/sigstore/bin/python -m sigstore verify github --bundle $(DIST)/SHA256SUMS.sigstore.json \
	  --cert-identity "$$GITHUB_SERVER_URL/$$GITHUB_WORKFLOW_REF" --repository "$$GITHUB_REPOSITORY" \
	  --ref "$$GITHUB_REF" --sha "$$GITHUB_SHA" $(DIST)/SHA256SUMS

$(VENV)/sigstore/.ready: ci/release.mk
	@$(or $(PYTHON),python3) -m venv $(VENV)/sigstore
	@$(VENV)/sigstore/bin/python -m pip install --quiet --disable-pip-version-check $(SIGSTORE)
	@touch $@

publish-github: $(READY)
	@$(RELEASE) scripts/publish_github.py $(VERSION) --dist $(DIST)

# The package index takes wheel and source distribution, and nothing else.
pypi-files:
	@rm -rf build/pypi && mkdir -p build/pypi && cp $(DIST)/megatron_fixes-*.whl $(DIST)/megatron_fixes-*.tar.gz build/pypi
