"""Stands in for a rules_* repository that Bazel before 7 would download, with its built-in rules."""

def _native_rules_impl(ctx):
    package, _, file = ctx.attr.defs.partition("/")
    ctx.file(package + "/BUILD", "")
    ctx.file(package + "/" + file, "".join([
        "def {rule}(**attrs):\n    native.{rule}(**attrs)\n".format(rule = rule)
        for rule in ctx.attr.rules
    ]))

native_rules = repository_rule(
    implementation = _native_rules_impl,
    attrs = {
        "defs": attr.string(mandatory = True, doc = "the .bzl file that is loaded"),
        "rules": attr.string_list(mandatory = True, doc = "the rules it has to offer"),
    },
)
