#!/usr/bin/env bash
# Prepares a release: checks that all files have the same version, checks the packages, and creates a
# local annotated tag. It pushes nothing.
#   .ci/release.sh PYTHON VERSION
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
version=${2:-}
tag=v$version
fail() { echo "no release: $*" >&2; exit 1; }
# the first group of a pattern in the first matching line
said_in() { sed -n "s/$2/\1/p" "$1" | head -n 1; }
expect() { [ "$2" = "$version" ] || fail "expected version $version in $1, got ${2:-none}"; }

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "expected VERSION=X.Y.Z, got '$version'"
expect grpo_kernels/common/version.py "$(said_in grpo_kernels/common/version.py '^VERSION = "\(.*\)"$')"
expect CITATION.cff "$(said_in CITATION.cff '^version: \(.*\)$')"
expect CHANGELOG.md "$(said_in CHANGELOG.md '^## \([0-9][^ ]*\).*$')"
! grep -q '^## Unreleased' CHANGELOG.md || fail "CHANGELOG.md has an unreleased section"
[ -z "$(git status --porcelain)" ] || fail "the working tree has changes"
[ "$(git branch --show-current)" = main ] || fail "expected the branch main"
! git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null || fail "the tag $tag exists already"

make test-newest PYTHON="$python"  # what users install today
.ci/check_packages.sh "$python"
git tag --annotate "$tag" --message "grpo-kernels $version"
echo "Created $tag locally. This publishes it once the checks of wheels.yml pass:"
echo "    git push origin main $tag"
