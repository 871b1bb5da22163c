"""Stands in for a rules_* repository that Bazel before 7 would download, with its built-in rules."""

def _native_rules_impl(ctx):
    package, _, file = ctx.attr.defs.partition("/")
    loads = [
        "load(\"{file}\", _{rule} = \"{rule}\")\n{rule} = _{rule}\n".format(file = file, rule = rule)
        for rule, file in ctx.attr.loaded.items()
    ]
    rules = [
        "def {rule}(**attrs):\n    native.{rule}(**attrs)\n".format(rule = rule)
        for rule in ctx.attr.rules
    ]
    ctx.file(package + "/BUILD", "")
    ctx.file(package + "/" + file, "".join(loads + rules))

native_rules = repository_rule(
    implementation = _native_rules_impl,
    attrs = {
        "defs": attr.string(mandatory = True, doc = "the .bzl file that is loaded"),
        "loaded": attr.string_dict(doc = "rules that Bazel has in a .bzl file, and the file"),
        "rules": attr.string_list(mandatory = True, doc = "the rules it has to offer"),
    },
    doc = "A repository whose rules are the native ones.",
)
