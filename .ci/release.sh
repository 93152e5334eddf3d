#!/usr/bin/env bash
# Prepares a release: checks that the version is said everywhere, checks the packages, and makes the
# annotated tag here. It pushes nothing.
#   .ci/release.sh PYTHON VERSION
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
version=${2:-}
tag=v$version
refuse() { echo "no release: $*" >&2; exit 1; }
# the first group of a pattern, in the first line that has it
said_in() { sed -n "s/$2/\1/p" "$1" | head -n 1; }
expect() { [ "$2" = "$version" ] || refuse "expected version $version in $1, got ${2:-none}"; }

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || refuse "expected VERSION=X.Y.Z, got '$version'"
expect grpo_kernels/common/version.py "$(said_in grpo_kernels/common/version.py '^VERSION = "\(.*\)"$')"
expect CITATION.cff "$(said_in CITATION.cff '^version: \(.*\)$')"
expect CHANGELOG.md "$(said_in CHANGELOG.md '^## \([0-9][^ ]*\).*$')"
! grep -q '^## Unreleased' CHANGELOG.md || refuse "CHANGELOG.md has an unreleased section"
[ -z "$(git status --porcelain)" ] || refuse "the working tree has changes"
[ "$(git branch --show-current)" = main ] || refuse "expected the branch main"
! git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null || refuse "the tag $tag is there already"

make test-newest PYTHON="$python"  # what users install today
.ci/check_packages.sh "$python"
git tag --annotate "$tag" --message "grpo-kernels $version"
echo "$tag is made here. This publishes it, after the checks of wheels.yml:"
echo "    git push origin main $tag"
