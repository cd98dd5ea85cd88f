"""Texts of a format that JSON Schema names, in GBNF. Called by `kinds`.

Each is a part of what the standards allow, and nothing besides.
"""

from __future__ import annotations

_HEX = "[0-9a-fA-F]"
_DAYS = (
    '("01" | "03" | "05" | "07" | "08" | "10" | "12") "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("04" | "06" | "09" | "11") "-" ("0" [1-9] | [12] [0-9] | "30")'
    ' | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8])'
)
_LEAP_YEAR = (
    '([12] [0-9] ("0" [48] | [2468] [048] | [13579] [26]) | ("16" | "20" | "24" | "28") "00")'
)
_DATE = f'([12] [0-9]{{3}} "-" ({_DAYS}) | {_LEAP_YEAR} "-02-29")'
_HOUR = '([01] [0-9] | "2" [0-3])'
_MINUTE = "[0-5] [0-9]"
_ZONE = f'("Z" | [-+] {_HOUR} ":" {_MINUTE})'
_TIME = f'{_HOUR} ":" {_MINUTE} ":" {_MINUTE} ("." [0-9]{{1,6}})? {_ZONE}'
_BYTE = '("25" [0-5] | "2" [0-4] [0-9] | "1" [0-9]{2} | [1-9]? [0-9])'
_LABEL = "[a-zA-Z0-9] ([a-zA-Z0-9-]{0,30} [a-zA-Z0-9])?"
_HOSTNAME = f'({_LABEL} "."){{0,6}} [a-zA-Z] ([a-zA-Z0-9-]{{0,30}} [a-zA-Z0-9])?'
_COUNT = "[0-9]{1,4}"
_MINUTES = f'{_COUNT} "M" ({_COUNT} "S")?'
_DAY_TIME = f'"T" ({_COUNT} "H" ({_MINUTES})? | {_MINUTES} | {_COUNT} "S")'
_DURATION = (
    f'"P" ({_COUNT} "W" | {_DAY_TIME} | ({_COUNT} "Y" ({_COUNT} "M" ({_COUNT} "D")?)?'
    f' | {_COUNT} "M" ({_COUNT} "D")? | {_COUNT} "D") ({_DAY_TIME})?)'
)
_IN_URI = "[a-zA-Z0-9._~!$&'()*+,;=:@-]"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "duration": _DURATION,
    "uuid": f'{_HEX}{{8}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{12}}',
    "email": f'[a-zA-Z0-9_+-]{{1,32}} ("." [a-zA-Z0-9_+-]{{1,32}}){{0,3}} "@" {_HOSTNAME}',
    "hostname": _HOSTNAME,
    "ipv4": f'{_BYTE} ("." {_BYTE}){{3}}',
    "ipv6": f'{_HEX}{{1,4}} (":" {_HEX}{{1,4}}){{7}}',
    "uri": f'"http" "s"? "://" {_HOSTNAME} ("/" {_IN_URI}{{0,40}}){{0,8}} ("?" {_IN_URI}{{0,80}})?',
}
