"""The words that classifier and mutations know: categories and their signs, fillers, fallbacks,
constraints, steps.

English. A prompt in another language is of the category GENERAL_QA, and gets that one's phrases.
"""

from typing import Literal, get_args

Category = Literal[
    "CODE_GENERATION",
    "CODE_REVIEW",
    "CONTENT_WRITING",
    "MARKETING_COPY",
    "DATA_ANALYSIS",
    "GENERAL_QA",
    "CREATIVE_WRITING",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

SIGNS: dict[Category, tuple[str, ...]] = {  # regular expressions, each counts once
    "CODE_GENERATION": (
        r"\b(write|implement|create|build|code|generate|develop)\b.{0,60}\b(function|class|script|program|api|code|app"
        r"|endpoint|query|module|component|regex|cli|parser|test|tests|method|library)\b",
        r"\b(python|javascript|typescript|java|rust|golang|c\+\+|sql|html|css|bash|react|kotlin|swift)\b",
        r"\b(algorithm|data structure|recursion|binary tree|linked list|hash map|sort(ing)? (function|algorithm))\b",
        r"\b(returns?|accepts?|takes)\b.{0,30}\b(list|string|integer|array|dict|argument|arguments|parameter)\b",
        r"\b(implement|scaffold|program)\b",
    ),
    "CODE_REVIEW": (
        r"\b(review|refactor|debug|optimi[sz]e|fix|audit|clean up|improve)\b.{0,60}\b(code|function|bug|class|script"
        r"|query|module|error|exception|pull request|implementation|method|test|tests)\b",
        r"\b(bug|bugs|stack trace|traceback|exception|segfault|memory leak|race condition|code smell|deadlock)\b",
        r"\b(pull request|code review|diff|patch|lint|technical debt)\b",
        r"\bwhy (does|is|do)\b.{0,40}\b(crash|fail|fails|failing|slow|throw|error)\b",
        r"```",
    ),
    "CONTENT_WRITING": (
        r"\b(write|draft|compose|edit|rewrite|proofread)\b.{0,60}\b(article|blog|post|essay|report|email|letter|guide"
        r"|documentation|summary|newsletter|tutorial|memo|speech|announcement)\b",
        r"\b(article|blog post|essay|press release|white ?paper|newsletter|tutorial|user guide|cover letter)\b",
        r"\b(paragraphs?|introduction|conclusion|outline|headings?|tone of voice|proofread)\b",
        r"\b(summari[sz]e|paraphrase)\b",
    ),
    "MARKETING_COPY": (
        r"\b(ad|ads|advert|advertisement|slogan|tagline|headline|landing page|call to action|cta|copy|campaign)\b",
        r"\b(brand|product launch|target audience|customers?|promotion|discount|conversion|seo|value proposition)\b",
        r"\b(instagram|facebook|linkedin|tiktok|twitter|social media|email campaign|product description)\b",
        r"\b(sell|promote|persuade|market(ing)?|advertise)\b",
    ),
    "DATA_ANALYSIS": (
        r"\b(analy[sz]e|explore|visuali[sz]e|plot|aggregate|correlate|forecast|cluster|compare)\b.{0,60}\b(data|dataset"
        r"|table|csv|numbers|sales|results|survey|metrics|trend|trends|figures|logs)\b",
        r"\b(dataset|data set|csv|spreadsheet|excel|dataframe|pandas|database|time series)\b",
        r"\b(correlation|regression|average|median|variance|outliers?|distribution|significance|histogram|p-value)\b",
        r"\b(chart|graph|dashboard|kpi|trend|trends|quarterly|churn|revenue)\b",
    ),
    "GENERAL_QA": (
        r"^(what|who|when|where|why|how|which|is|are|does|do|can|could|should)\b",
        r"\b(explain|define|describe|tell me about|difference between|meaning of|what is|how does)\b",
        r"\?\s*$",
    ),
    "CREATIVE_WRITING": (
        r"\b(write|compose|create|tell|invent)\b.{0,60}\b(story|poem|haiku|song|lyrics|novel|scene|dialogue|limerick"
        r"|fairy tale|screenplay|character|sonnet|fable)\b",
        r"\b(story|poem|haiku|sonnet|fiction|novel|plot twist|screenplay|fairy tale|lyrics|limerick|fable)\b",
        r"\b(protagonist|villain|character|narrator|dragon|detective|fantasy|science fiction|once upon a time)\b",
        r"\b(rhym(e|es|ing)|verse|stanza|metaphor|imagin(e|ary|ative))\b",
    ),
}

VERBS: dict[str, tuple[str, ...]] = {  # of a prompt's task → its family
    "mend": (
        "fix",
        "debug",
        "repair",
        "solve",
        "resolve",
        "refactor",
        "optimize",
        "optimise",
        "improve",
        "correct",
    ),
    "make": (
        "write",
        "create",
        "build",
        "implement",
        "generate",
        "design",
        "draft",
        "compose",
        "develop",
        "make",
        "code",
        "produce",
        "invent",
        "plan",
    ),
    "study": (
        "analyze",
        "analyse",
        "review",
        "evaluate",
        "compare",
        "examine",
        "explain",
        "summarize",
        "summarise",
        "describe",
        "explore",
        "classify",
        "assess",
        "research",
        "audit",
        "visualize",
        "plot",
    ),
    "other": (
        "translate",
        "convert",
        "find",
        "list",
        "calculate",
        "compute",
        "sort",
        "count",
        "reverse",
        "extract",
        "read",
        "collect",
        "check",
        "identify",
        "suggest",
        "recommend",
        "tell",
        "show",
        "give",
        "answer",
        "rewrite",
        "edit",
        "test",
        "deploy",
        "migrate",
        "install",
        "configure",
        "document",
        "add",
        "remove",
        "update",
        "publish",
        "send",
    ),
}
_VERB = f"(?:{'|'.join(verb for family in VERBS.values() for verb in family)})"
_MUCH = r"(?: so| very)?(?: much)?(?: (?:in advance|for your (?:help|time)|a lot))?"
_POLITE = "(?:please |kindly |maybe |perhaps |possibly )"

# A sentence that a prompt can do without, as regular expressions that match the whole of it.
SMALL_TALK = (
    r"(?:hi|hello|hey|dear|good (?:morning|afternoon|evening))(?: there| everyone| team| all)?",
    r"i hope (?:you(?: are|'re) (?:doing )?(?:well|fine|good)|you (?:had|have) a (?:nice|good|great) \w+"
    r"|this finds you well|(?:all|everything) is (?:well|fine|good))(?: (?:today|with you|on your end))?",
    r"sorry (?:for (?:bothering|asking|the (?:long|many|silly|stupid) \w+)|to bother)(?: you)?(?: again)?",
    r"i know (?:that )?you(?: are|'re) (?:very |really |probably )?busy",
    rf"(?:many |a thousand )?(?:thanks|thank you){_MUCH}",
    rf"i (?:really |would |very much )?appreciate (?:it|this|that|your (?:help|time|support|patience)){_MUCH}",
    r"i(?:'ve| have) been (?:thinking|struggling|working) (?:about|with|on) (?:this|it)(?: for (?:days|hours|weeks)"
    r"| all (?:day|week|night))?",
    r"my (?:boss|manager|colleague|teacher|friend) (?:told|asked|wants) me to (?:ask you(?: this)?|do (?:this|it))",
    r"this is (?:really |very )?(?:important|urgent)(?: (?:to|for) (?:me|us))?",
    r"it(?:'s| is| has) been a (?:long|hard) (?:day|week|month)",
    r"no rush(?: at all)?",
    r"let me know (?:when you can|if (?:it|this) is too much|if you have (?:any )?questions"
    r"|if you need anything(?: else)?)",
    r"(?:i(?:'m| am) )?looking forward to (?:it|your (?:answer|reply|help)|hearing from you)",
    r"i(?:'m| am) not (?:really )?sure (?:where to (?:start|begin)|(?:(?:if|whether) )?(?:it|this) is(?: even)?"
    r" possible)",
)
# What a sentence can begin with. The second takes the question mark with it.
OPENINGS = (
    r"(?:hi|hello|hey|good (?:morning|afternoon|evening))(?: there| everyone| team| all)?, ",
    rf"{_POLITE}?(?:could|can|would|will) you {_POLITE}*(?:help me (?:to |with )?(?={_VERB}\b)|(?={_VERB}\b))",
    r"(?:as you (?:may|might|probably|surely) (?:already )?know|needless to say|it goes without saying that"
    r"|as i mentioned(?: before| earlier)?|to be honest|if you don't mind"
    r"|if you (?:have|get) (?:a|the) (?:moment|chance)|when you have time),? ",
    rf"(?:i was wondering (?:if|whether)|i would like to ask (?:if|whether)) you (?:could|can|would|might) {_POLITE}*"
    rf"(?:help me (?:to |with )?)?(?={_VERB}\b)",
    rf"would it be possible (?:for you )?to (?={_VERB}\b)",
    rf"(?:i'd like|i would like|i want|i need|what i need is for) you to {_POLITE}*(?={_VERB}\b)",
    r"(?:please|kindly),? ",
    r"(?:basically|actually|obviously|honestly), ",
)
# What can go from within a sentence, or from its end.
INSIDE = (
    rf"(?<![-\w])(?:please|kindly) (?={_VERB}\b)",
    r"(?<!say)(?<!says)(?<!said),? please(?=[.!?]*$)",
    r",? (?:if you don't mind|if (?:at all )?possible|if you (?:have|get) (?:a|the) (?:moment|chance|time)"
    r"|when you have time)(?=[.!?]*$)",
    rf", (?:many )?(?:thanks|thank you){_MUCH}(?=[.!?]*$)",
    r"(?<!not )(?<!n't )(?<![-\w])(?:very|really) (?=\w)",
    rf"(?<![-\w])just (?=(?:{_VERB}|want|need|wanted|needed)\b)",
)

FALLBACKS: dict[str, tuple[str, ...]] = {
    "mend": (
        "If the cause is not clear, name the two likeliest causes and how to tell them apart.",
        (
            "If a complete fix is out of reach, give the smallest change that makes things"
            " better, and say what is left."
        ),
    ),
    "make": (
        "If something needed is missing, state the assumption you make and go on.",
        (
            "If the whole is too much for one answer, deliver a working core first and list what"
            " is still open."
        ),
    ),
    "study": (
        (
            "If the information is not enough for a conclusion, say what is missing and how sure"
            " you are of the rest."
        ),
        "If sources or readings disagree, show both and say which one you would rely on.",
    ),
    "other": (
        "If the request can be read in two ways, answer the likelier one and mention the other.",
        "If you cannot do it exactly, give the closest result that you can and say how it differs.",
    ),
}

CONSTRAINTS: dict[Category, tuple[str, ...]] = {
    "CODE_GENERATION": (
        "Handle empty and invalid input explicitly.",
        "Use only the standard library unless a dependency is named above.",
        "Give every public function type annotations and a one-line docstring.",
        "Include at least one example call with its expected output.",
        "Keep each function under 30 lines.",
    ),
    "CODE_REVIEW": (
        "Order the findings by severity and quote the line each one is about.",
        "Do not change behaviour that is not part of the problem.",
        "Show the corrected code for every finding.",
        "Name the test that would have caught each fault.",
        "Separate facts from guesses.",
    ),
    "CONTENT_WRITING": (
        "Keep it under 400 words.",
        "Use short paragraphs with a heading for each.",
        "Write for readers who are new to the subject.",
        "Support every claim with an example or a source.",
        "Use the active voice.",
    ),
    "MARKETING_COPY": (
        "Lead with one benefit for the reader, not with a feature.",
        "End with exactly one call to action.",
        "Keep it under 120 words.",
        "Make no claim that cannot be proven.",
        "Address the reader directly.",
    ),
    "DATA_ANALYSIS": (
        "State the number of rows used and how missing values were treated.",
        "Give each result with its unit and its uncertainty.",
        "Name the method before the result.",
        "Put the main finding in the first sentence.",
        "Point out what the data cannot show.",
    ),
    "GENERAL_QA": (
        "Answer in the first sentence, then explain.",
        "Keep it under 200 words.",
        "Say so when something is uncertain.",
        "Use one concrete example.",
        "Define every technical term at its first use.",
    ),
    "CREATIVE_WRITING": (
        "Show feelings through actions, not through adjectives.",
        "Keep one point of view throughout.",
        "Avoid stock phrases and familiar endings.",
        "Use at least two of the senses besides sight.",
        "Keep it under 500 words.",
    ),
}

STEPS: dict[Category, tuple[str, ...]] = {
    "CODE_GENERATION": (
        "Restate inputs, outputs and edge cases",
        "Choose the data structures and the interface",
        "Write the code",
        "Test it on a normal, an empty and a wrong input",
    ),
    "CODE_REVIEW": (
        "Say what the code is meant to do",
        "Find where it does something else",
        "Correct each fault with the smallest change",
        "Check that the rest still works",
    ),
    "CONTENT_WRITING": (
        "Name the reader and the one message",
        "Outline the sections",
        "Write each section",
        "Cut what does not serve the message",
    ),
    "MARKETING_COPY": (
        "Name the customer and their problem",
        "Pick the one benefit that matters most",
        "Write the copy around it",
        "Finish with a call to action",
    ),
    "DATA_ANALYSIS": (
        "Describe the data and check its quality",
        "Choose the measure that answers the question",
        "Compute and show the results",
        "Say what they mean and how sure that is",
    ),
    "GENERAL_QA": (
        "Say what is being asked",
        "Collect the facts that matter",
        "Give the answer with its reason",
    ),
    "CREATIVE_WRITING": (
        "Decide on the setting, the character and what they want",
        "Plan a turn that surprises",
        "Write it scene by scene",
        "Revise the first and the last line",
    ),
}

CRITERIA: dict[Category, tuple[str, str]] = {  # what a good answer is, for an expansion
    "CODE_GENERATION": ("it runs as it stands", "every edge case named above is handled"),
    "CODE_REVIEW": ("every finding can be reproduced", "each one comes with a correction"),
    "CONTENT_WRITING": (
        "a newcomer understands it at the first reading",
        "it keeps to one message",
    ),
    "MARKETING_COPY": (
        "the benefit is clear within five seconds",
        "the reader knows what to do next",
    ),
    "DATA_ANALYSIS": ("another analyst can repeat it", "each conclusion points at a number"),
    "GENERAL_QA": ("the question is answered in full", "facts and opinions are kept apart"),
    "CREATIVE_WRITING": (
        "it has a beginning, a turn and an end",
        "the voice stays the same throughout",
    ),
}

TERMS = {  # vague words → what they are to mean
    "optimize": "make measurably faster or smaller without changing the result",
    "optimise": "make measurably faster or smaller without changing the result",
    "improve": "change so that a named quality gets better and nothing else gets worse",
    "refactor": "change the structure without changing the behaviour",
    "scalable": "still works when load and data grow tenfold",
    "robust": "gives a clear error instead of failing on unusual input",
    "efficient": "uses little time and memory for the size of its input",
    "secure": "withstands input that is made to do harm",
    "clean": "readable by someone who has not written it",
    "modern": "in line with what is recommended today",
    "simple": "with as few parts as the task needs",
    "engaging": "so that the reader wants to read on",
    "professional": "polite, precise and without slang",
    "better": "by a measure that the answer names",
    "good": "by a measure that the answer names",
    "nice": "pleasant to the intended reader",
    "short": "at most 100 words",
    "detailed": "with every step and its reason",
    "analyze": "find what the data say, and how surely",
    "analyse": "find what the data say, and how surely",
    "summarize": "give the main points in a tenth of the length",
    "insight": "a finding that changes what one would do",
    "insights": "findings that change what one would do",
    "best practices": "what experienced practitioners agree on today",
}
